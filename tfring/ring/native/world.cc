// Opening, links, groups, and the turn of calls.
#include "world.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>

#include "process.h"
#include "trace.h"

namespace tfring {
namespace {

constexpr std::chrono::milliseconds kSlice(100);  // between looks at Ctrl-C

constexpr uint64_t kMixer = 0x9e3779b97f4a7c15u;
uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * kMixer;
  return hash ^ (hash >> 31);
}

std::unique_ptr<Mailbox> map(int memory_fd, int doorbell_fd, bool* mapped) {
  if (memory_fd < 0) return nullptr;
  std::unique_ptr<Mailbox> mailbox = Mailbox::open(memory_fd, doorbell_fd);
  *mapped = *mapped && mailbox != nullptr;
  return mailbox;
}

}  // namespace

int Group::position_of(int of_member) const {
  return static_cast<int>(std::find(member_at.begin(), member_at.end(), of_member) - member_at.begin());
}

World::World(const tfring_options& options)
    : name_(options.name),
      identity_(options.identity),
      rank_(options.rank),
      world_size_(options.world_size),
      host_(options.host),
      num_spins_(options.num_spins),
      algorithm_(static_cast<Algorithm>(options.algorithm)),
      lost_seconds_(options.lost_seconds),
      stall_seconds_(options.stall_seconds),
      timeout_seconds_(options.opening_timeout_seconds),
      hosts_(static_cast<size_t>(options.world_size)),
      links_(static_cast<size_t>(options.world_size)),
      counts_(static_cast<size_t>(options.world_size)),
      num_sent_(static_cast<size_t>(options.world_size)),
      num_received_(static_cast<size_t>(options.world_size)),
      in_call_(static_cast<size_t>(options.world_size)) {
  state_.name = name_;
  if (options.hosts != nullptr) hosts_.assign(options.hosts, options.hosts + options.world_size);
}

World::~World() { close(); }

Status World::open(const tfring_options& options, std::shared_ptr<World>* world,
                   std::shared_ptr<Group>* all) {
  world->reset(new World(options));
  *all = std::make_shared<Group>();
  TFRING_TRY((*world)->connect(options, all->get()));
  const tfring_call opening{"opening", 0, 0, 0, TFRING_PYTHON_MAIN_THREAD, 0, 0, nullptr};
  TFRING_TRY((*world)->barrier(all->get(), opening));
  (*world)->statistics_ = tfring_statistics{};
  (*world)->timeout_seconds_ = options.timeout_seconds;
  (*world)->start_asking();
  return {};
}

Status World::connect(const tfring_options& options, Group* all) {
  all->name = name_;
  all->is_world = true;
  all->identity = identity_;
  for (int r = 0; r < world_size_; ++r) all->ranks.push_back(r);
  all->member = rank_;
  for (Past& past : past_) past.numbers.resize(static_cast<size_t>(world_size_));
  all->sequence = UINT64_MAX;  // the opening barrier is collective 0, the user's first 1
  place(all);
  Status status;
  for (int i = 0; i < options.num_links; ++i) {  // all of them: each holds descriptors
    const Status added = add_link(options.links[i]);
    if (status.ok()) status = added;
  }
  if (world_size_ == 1) return status;
  news_fd_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  join_ring(identity_, &state_);
  watch_over(this);
  return status;
}

Status World::add_link(const tfring_link& from) {
  auto link = std::make_unique<Link>();
  link->rank = from.rank;
  link->host = from.host;
  link->control_fd = Fd(from.control_fd);
  link->data_fd = Fd(from.data_fd);
  bool mapped = true;
  link->own = map(from.own_mailbox_fd, from.own_doorbell_fd, &mapped);
  link->peers = map(from.mailbox_fd, from.doorbell_fd, &mapped);
  if (!mapped) return {Code::kInternal, "rank " + std::to_string(rank_) + " could not map shared memory"};
  prepare_control(link->control_fd.get(), lost_seconds_);
  if (link->own != nullptr) {
    link->sender = make_shm_sender(link->peers.get());
    link->receiver = make_shm_receiver(link->own.get(), link->peers.get());
  } else {
    link->sender = make_tcp_sender(link->data_fd.get());
    link->receiver = make_tcp_receiver(link->data_fd.get());
  }
  std::lock_guard<std::mutex> lock(control_mutex_);
  links_[static_cast<size_t>(from.rank)] = std::move(link);
  return {};
}

// May run while a call is under way, which uses none of these links: its own were there when it began.
Status World::adopt_link(const tfring_link& from) {
  TFRING_TRY(add_link(from));
  std::lock_guard<std::mutex> lock(control_mutex_);
  auto& link = links_[static_cast<size_t>(from.rank)];
  if (!failure_.ok()) pass_on(failure_, *link);
  if (released_) {
    send_control(*link, make_control(ControlType::kGoodbye, rank_, common_calls(from.rank)));
    link.reset();
    return {Code::kInvalid, "this communicator is closed"};
  }
  send_control(*link, make_control(ControlType::kPing, rank_, 0));  // who has spoken is asked from then on
  wake_watcher();
  return {};
}

// Orders the members of a group: those of a host in a row.
void World::place(Group* group) const {
  const auto host_of = [&](int member) {
    return hosts_[static_cast<size_t>(group->ranks[static_cast<size_t>(member)])];
  };
  group->member_at.clear();
  for (int m = 0; m < group->size(); ++m) group->member_at.push_back(m);
  std::stable_sort(group->member_at.begin(), group->member_at.end(),
                   [&](int a, int b) { return host_of(a) < host_of(b); });
  group->order.clear();
  std::vector<int> sizes;  // of the hosts
  for (int p = 0; p < group->size(); ++p) {
    const int member = group->member_at[static_cast<size_t>(p)];
    group->order.push_back(group->ranks[static_cast<size_t>(member)]);
    if (p == 0 || host_of(member) != host_of(group->member_at[static_cast<size_t>(p - 1)]))
      sizes.push_back(0);
    ++sizes.back();
  }
  group->position = group->position_of(group->member);
  const bool alike = std::all_of(sizes.begin(), sizes.end(), [&](int size) { return size == sizes[0]; });
  group->local_size = alike ? sizes[0] : 1;
}

Status World::make_group(const Group& parent, const int32_t* members, int num_members, const char* name,
                         std::shared_ptr<Group>* group) const {
  *group = std::make_shared<Group>();
  Group& made = **group;
  made.name = name;
  made.identity = mix(parent.identity, 1);
  for (const char* at = name; *at != '\0'; ++at)
    made.identity = mix(made.identity, static_cast<unsigned char>(*at));
  made.member = -1;
  for (int m = 0; m < num_members; ++m) {
    made.identity = mix(made.identity, static_cast<uint64_t>(members[m]));
    made.ranks.push_back(parent.ranks[static_cast<size_t>(members[m])]);
    if (made.ranks.back() == rank_) made.member = m;
  }
  place(&made);
  return {};
}

// Takes the turn, unless this thread has it: a signal handler that runs inside a collective calls another.
// Two threads that call the same of one group at the same time have no order that other ranks could know.
Status World::enter(const tfring_call& call, const Group* group) {
  if (runner_ == std::this_thread::get_id()) {
    return {Code::kInvalid, std::string("\"") + call.name +
                                "\" was called from within a collective of ring \"" + name_ +
                                "\", by a signal handler or a destructor"};
  }
  std::unique_lock<std::mutex> lock(turn_mutex_);
  if (busy_ && group != nullptr && group->size() > 1 && group == busy_group_ &&
      std::strcmp(call.name, busy_name_) == 0) {
    lock.unlock();
    return fail(Code::kMismatch,
                "two threads of rank " + std::to_string(rank_) + " called \"" + call.name + "\" of ring \"" +
                    group->name + "\" at the same time, and ranks cannot know whose call belongs to whose. " +
                    "Call it from one thread (of a Dataset.map without num_parallel_calls), or give each " +
                    "thread a communicator of its own");
  }
  while (busy_ && !closing_) {
    turn_.wait_for(lock, kSlice);
    if (!busy_ || call.caller == TFRING_ANY_THREAD) continue;
    lock.unlock();  // a handler may close this world
    const bool interrupted =
        call.caller == TFRING_PYTHON_MAIN_THREAD ? python_interrupted() : op_interrupted();
    lock.lock();
    if (interrupted)
      return {Code::kInterrupted, "interrupted while another thread used ring \"" + name_ + "\""};
  }
  if (closing_) return {Code::kInvalid, "this communicator is closed"};
  busy_ = true;
  busy_group_ = group;
  busy_name_ = call.name;
  runner_ = std::this_thread::get_id();
  return {};
}

void World::leave() {
  runner_ = std::thread::id();
  std::lock_guard<std::mutex> lock(turn_mutex_);
  busy_ = false;
  turn_.notify_all();
}

// Ends a call in another thread, waits for that, says goodbye. From within a call of this thread's it only
// ends that; the last owner of the world releases it.
void World::close() {
  closing_ = true;
  announce();
  if (runner_ == std::this_thread::get_id()) return;
  {
    std::unique_lock<std::mutex> lock(turn_mutex_);
    turn_.notify_all();
    turn_.wait(lock, [this] { return !busy_; });
  }
  release();
}

void World::release() {
  unwatch(this);
  std::lock_guard<std::mutex> lock(control_mutex_);
  if (released_) return;
  released_ = true;
  if (world_size_ > 1) leave_ring(&state_);
  for (auto& link : links_) {
    if (link == nullptr) continue;
    send_control(*link, make_control(ControlType::kGoodbye, rank_, common_calls(link->rank)));
    link.reset();
  }
}

tfring_statistics World::statistics() {
  const bool mine = runner_ == std::this_thread::get_id();  // a signal handler's
  std::unique_lock<std::mutex> lock(turn_mutex_);
  if (!mine) turn_.wait(lock, [this] { return !busy_; });
  tfring_statistics statistics = statistics_;
  statistics.scratch_bytes = scratch_bytes_ + row_sums_.num_bytes();
  return statistics;
}

void World::abort(const Status& why) {
  std::lock_guard<std::mutex> lock(control_mutex_);
  break_up(why);
}

Status World::failure() {
  std::lock_guard<std::mutex> lock(control_mutex_);
  if (interrupted_) return {Code::kInterrupted, failure_.message};
  for (const auto& link : links_) {
    if (failure_.ok() && link != nullptr && !link->failure.ok()) return link->failure;
  }
  return failure_;
}

Status World::need_scratch(int64_t size) {
  if (scratch_bytes_ >= size) return {};
  scratch_.reset();
  scratch_bytes_ = 0;
  scratch_.reset(new (std::nothrow) char[static_cast<size_t>(size)]);
  if (scratch_ == nullptr) {
    return fail(Code::kInternal, "rank " + std::to_string(rank_) + " has no memory for " +
                                     std::to_string(size) + " bytes of scratch in " + here());
  }
  scratch_bytes_ = size;
  return {};
}

// Validates a call without asking the other ranks; a rank rejected here has not begun, and may go on.
Status World::check(const Group& group, Kind kind, const tfring_call& call, const tfring_tensor* tensors,
                    int num_tensors) const {
  const auto invalid = [&](const std::string& rule) {
    return Status(Code::kInvalid, std::string(name_of(kind)) + " \"" + call.name + "\": " + rule);
  };
  if (group.member < 0) {
    return invalid("rank " + std::to_string(rank_) + " is not in group \"" + group.name + "\"");
  }
  for (int t = 0; t < num_tensors; ++t) {
    const DType dtype = static_cast<DType>(tensors[t].dtype);
    if (size_of(dtype) == 0)
      return invalid("the ring carries no dtype number " + std::to_string(tensors[t].dtype));
    if (reduces(kind) && !can_reduce(dtype, static_cast<Op>(call.op))) {
      if (dtype != DType::kBool)
        return invalid(std::string("numbers of ") + name_of(dtype) + " have no order");
      return invalid(
          "bool has no sum and no product. Use op=\"max\" for any, op=\"min\" for all, or cast to an integer "
          "to count");
    }
    if (reduces(kind) && tensors[t].dtype != tensors[0].dtype) {
      return invalid(std::string("tensors reduced together share one dtype. Received: ") +
                     name_of(static_cast<DType>(tensors[0].dtype)) + " and " + name_of(dtype));
    }
    if (by_rows(kind) && tensors[t].num_dims == 0) {
      return invalid("it works on rows, so tensors have at least one dimension. Received: a scalar");
    }
    if (kind == Kind::kSend && tensors[t].num_dims > kMaxDims) {
      return invalid("tensors sent have at most " + std::to_string(kMaxDims) +
                     " dimensions. Received: " + std::to_string(tensors[t].num_dims));
    }
  }
  if (kind == Kind::kAllReduceRows) TFRING_TRY(RowSums::check(call, tensors, num_tensors, group.size()));
  if (call.compression != 0) {
    const DType wire = static_cast<DType>(call.compression);
    if (kind != Kind::kAllReduce || static_cast<Op>(call.op) != Op::kSum ||
        tensors[0].dtype != static_cast<int>(DType::kFloat32) ||
        (wire != DType::kBfloat16 && wire != DType::kFloat16)) {
      return invalid("compression is bfloat16 or float16, of a sum of float32. Received: " +
                     std::string(name_of(wire)) + " of a " + name_of(static_cast<Op>(call.op)) + " of " +
                     name_of(static_cast<DType>(tensors[0].dtype)));
    }
  }
  if (has_root(kind) && (call.root < 0 || call.root >= group.size())) {
    const std::string what = kind == Kind::kSend ? "to" : kind == Kind::kReceive ? "source" : "root";
    return invalid(what + " runs from 0 to " + std::to_string(group.size() - 1) + ". Received: " + what +
                   "=" + std::to_string(call.root));
  }
  if (is_pairwise(kind) && call.root == group.member) {
    return invalid("the peer is another rank. Received: " + std::to_string(call.root) +
                   ", which is this one");
  }
  return {};
}

Status World::begin(Group* group, Kind kind, const tfring_call& call, const tfring_tensor* tensors,
                    int num_tensors) {
  TFRING_TRY(check(*group, kind, call, tensors, num_tensors));
  plan_.clear(world_size_);
  plan_.dtype = num_tensors > 0 ? static_cast<DType>(tensors[0].dtype) : DType::kUint8;
  plan_.op = static_cast<Op>(call.op);
  group_ = group;
  caller_ = call.caller;
  of_all_ = group->size() == world_size_ && !is_pairwise(kind);
  on_pool_thread_ = of_all_ && caller_ == TFRING_TENSORFLOW_OP && on_pool_thread();
  std::lock_guard<std::mutex> lock(control_mutex_);
  const auto refuse = [this] {
    const bool told = told_;
    told_ = true;
    if (!told) return failure_;
    return Status(failure_.code, "ring \"" + name_ + "\" can no longer be used: " + failure_.message);
  };
  if (!failure_.ok()) return refuse();
  std::fill(in_call_.begin(), in_call_.end(), uint8_t{0});
  const auto count = [this](int rank) {
    if (rank == rank_) return;
    in_call_[static_cast<size_t>(rank)] = 1;
    ++counts_[static_cast<size_t>(rank)];
  };
  uint64_t sequence = 0;
  if (is_pairwise(kind)) {
    const int peer = group->ranks[static_cast<size_t>(call.root)];
    count(peer);
    sequence = ++(kind == Kind::kSend ? num_sent_ : num_received_)[static_cast<size_t>(peer)];
  } else {
    for (int rank : group->ranks) count(rank);
    sequence = ++group->sequence;
  }
  if (call.sequence != nullptr) *call.sequence = sequence;
  header_ = make_header(*group, kind, call, tensors, num_tensors, sequence);
  header_.algorithm = static_cast<uint8_t>(algorithm_);
  if (kind == Kind::kAllReduceRows) header_.op = static_cast<uint8_t>(choose_way(*group, call, header_));
  if (!is_pairwise(kind)) remember();
  if (of_all_) ++state_.begun;
  ++num_calls_;
  num_chain_ = 0;
  begun_any_ = running_ = true;
  if (adopt_due_failures() || !check_left().ok()) {
    running_ = false;
    return refuse();
  }
  statistics_.collectives[static_cast<int>(kind)] += 1;
  traced_ = tracing();
  if (traced_) start_record(kind, call, tensors, num_tensors);
  return {};
}

void World::end(const Status& status) {
  if (traced_) finish_record(status);
  std::lock_guard<std::mutex> lock(control_mutex_);
  running_ = false;
  if (!status.ok()) told_ = true;
  adopt_due_failures();
}

}  // namespace tfring
