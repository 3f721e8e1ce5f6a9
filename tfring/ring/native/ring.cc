// The collectives: what each one plans before it runs.
#include "ring.h"

#include <sys/eventfd.h>

#include <chrono>
#include <new>

#include "kernels.h"
#include "process.h"
#include "tensor.h"

namespace tfring {
namespace {

constexpr std::chrono::milliseconds kSlice(100);  // between looks at Ctrl-C

// What this rank adds: zeros where it is inactive.
const void* contribution(const tfring_call& call, const tfring_tensor& tensor) {
  return call.inactive ? nullptr : tensor.input;
}

bool reduces(Kind kind) { return kind == Kind::kAllReduce || kind == Kind::kReduceScatter; }
bool by_rows(Kind kind) { return kind == Kind::kAllGather || kind == Kind::kReduceScatter; }

}  // namespace

Ring::Ring(const tfring_options& options)
    : name_(options.name),
      identity_(options.identity),
      rank_(options.rank),
      world_size_(options.world_size),
      host_(options.host),
      // Over TCP each look is a system call.
      num_spins_(options.mailbox_fd >= 0 ? options.num_spins : options.num_spins / 10),
      lost_seconds_(options.lost_seconds),
      stall_seconds_(options.stall_seconds),
      timeout_seconds_(options.opening_timeout_seconds) {}

Ring::~Ring() { close(); }

Status Ring::open(const tfring_options& options, std::shared_ptr<Ring>* ring) {
  ring->reset(new Ring(options));
  TFRING_TRY((*ring)->connect(options));
  const tfring_call opening{"opening", 0, 0, 0, TFRING_PYTHON_MAIN_THREAD};
  TFRING_TRY((*ring)->barrier(opening));
  (*ring)->statistics_ = tfring_statistics{};
  (*ring)->timeout_seconds_ = options.timeout_seconds;
  (*ring)->start_asking();
  return {};
}

Status Ring::connect(const tfring_options& options) {
  if (world_size_ == 1) return {};
  const tfring_link links[2] = {options.previous, options.next};
  for (Side side : {kPrevious, kNext}) {
    Control& control = controls_[side];
    control.fd = Fd(links[side].control_fd);
    control.rank = wrap(rank_ + (side == kNext ? 1 : -1), world_size_);
    control.host = links[side].host;
    prepare_control(control.fd.get(), lost_seconds_);
  }
  bool mapped = true;
  const auto map = [&](int memory_fd, int doorbell_fd) {
    std::unique_ptr<Mailbox> mailbox;
    if (memory_fd >= 0) {
      mailbox = Mailbox::open(memory_fd, doorbell_fd);
      mapped = mapped && mailbox != nullptr;
    }
    return mailbox;
  };
  own_mailbox_ = map(options.mailbox_fd, options.doorbell_fd);
  for (Side side : {kPrevious, kNext}) {
    neighbour_mailboxes_[side] = map(links[side].mailbox_fd, links[side].doorbell_fd);
  }
  if (links[kNext].data_fd >= 0) sender_ = make_tcp_sender(links[kNext].data_fd);
  if (links[kPrevious].data_fd >= 0) receiver_ = make_tcp_receiver(links[kPrevious].data_fd);
  if (!mapped) return fail(Code::kInternal, "rank " + std::to_string(rank_) + " could not map shared memory");
  if (sender_ == nullptr) sender_ = make_shm_sender(neighbour_mailboxes_[kNext].get());
  if (receiver_ == nullptr) {
    receiver_ = make_shm_receiver(own_mailbox_.get(), neighbour_mailboxes_[kPrevious].get());
  }
  news_fd_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  join_ring(identity_, &begun_);
  watch_over(this);
  return {};
}

// Takes the turn, unless this thread has it: a signal handler that runs inside a collective calls another.
Status Ring::enter(const tfring_call& call) {
  if (runner_ == std::this_thread::get_id()) {
    return {Code::kInvalid, std::string("\"") + call.name +
                                "\" was called from within a collective of ring \"" + name_ +
                                "\", by a signal handler or a destructor"};
  }
  std::unique_lock<std::mutex> lock(turn_mutex_);
  while (busy_ && !closing_) {
    turn_.wait_for(lock, kSlice);
    if (!busy_ || call.caller == TFRING_ANY_THREAD) continue;
    lock.unlock();  // a handler may close this ring
    const bool interrupted =
        call.caller == TFRING_PYTHON_MAIN_THREAD ? python_interrupted() : op_interrupted();
    lock.lock();
    if (interrupted)
      return {Code::kInterrupted, "interrupted while another thread used ring \"" + name_ + "\""};
  }
  if (closing_) return {Code::kInvalid, "this communicator is closed"};
  busy_ = true;
  runner_ = std::this_thread::get_id();
  return {};
}

void Ring::leave() {
  runner_ = std::thread::id();
  std::lock_guard<std::mutex> lock(turn_mutex_);
  busy_ = false;
  turn_.notify_all();
}

// Ends a collective in another thread, waits for that, says goodbye. From within a collective of this
// thread's it only ends that; whoever forgets the ring last releases it.
void Ring::close() {
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

void Ring::release() {
  unwatch(this);
  std::lock_guard<std::mutex> lock(control_mutex_);
  if (released_) return;
  released_ = true;
  if (world_size_ > 1) leave_ring(identity_);
  for (Side side : {kPrevious, kNext}) {
    send_control(side, make_control(ControlType::kGoodbye, rank_, finished_));
    controls_[side].fd.reset();
  }
  sender_.reset();
  receiver_.reset();
  own_mailbox_.reset();
  for (auto& mailbox : neighbour_mailboxes_) mailbox.reset();
}

tfring_statistics Ring::statistics() {
  const bool mine = runner_ == std::this_thread::get_id();  // a signal handler's
  std::unique_lock<std::mutex> lock(turn_mutex_);
  if (!mine) turn_.wait(lock, [this] { return !busy_; });
  tfring_statistics statistics = statistics_;
  statistics.scratch_bytes = scratch_bytes_;
  return statistics;
}

void Ring::abort(const Status& why) {
  std::lock_guard<std::mutex> lock(control_mutex_);
  fail_from(current(), why);
}

Status Ring::failure() {
  std::lock_guard<std::mutex> lock(control_mutex_);
  return interrupted_ ? Status(Code::kInterrupted, failure_.message) : failure_;
}

Status Ring::need_scratch(int64_t size) {
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

// What can be said without asking the other ranks; a rank refused here has not begun, and may go on.
Status Ring::check(Kind kind, const tfring_call& call, const tfring_tensor* tensors, int num_tensors) const {
  const auto invalid = [&](const std::string& rule) {
    return Status(Code::kInvalid, std::string(name_of(kind)) + " \"" + call.name + "\": " + rule);
  };
  for (int t = 0; t < num_tensors; ++t) {
    const DType dtype = static_cast<DType>(tensors[t].dtype);
    if (size_of(dtype) == 0)
      return invalid("the ring carries no dtype number " + std::to_string(tensors[t].dtype));
    if (reduces(kind) && !can_reduce(dtype, static_cast<Op>(call.op))) {
      if (dtype != DType::kBool)
        return invalid(std::string("numbers of ") + name_of(dtype) + " have no order");
      return invalid(
          "bool has no sum and no product. Use op=\"max\" for any, op=\"min\" for all, or cast to an integer "
          "to "
          "count");
    }
    if (reduces(kind) && tensors[t].dtype != tensors[0].dtype) {
      return invalid(std::string("tensors reduced together share one dtype. Received: ") +
                     name_of(static_cast<DType>(tensors[0].dtype)) + " and " + name_of(dtype));
    }
    if (by_rows(kind) && tensors[t].num_dims == 0) {
      return invalid("it works on rows, so tensors have at least one dimension. Received: a scalar");
    }
  }
  if (kind == Kind::kBroadcast && (call.root < 0 || call.root >= world_size_)) {
    return invalid("root runs from 0 to " + std::to_string(world_size_ - 1) +
                   ". Received: root=" + std::to_string(call.root));
  }
  return {};
}

Status Ring::begin(Kind kind, const tfring_call& call, const tfring_tensor* tensors, int num_tensors) {
  TFRING_TRY(check(kind, call, tensors, num_tensors));
  plan_.clear();
  plan_.dtype = num_tensors > 0 ? static_cast<DType>(tensors[0].dtype) : DType::kUint8;
  plan_.op = static_cast<Op>(call.op);
  caller_ = call.caller;
  on_pool_thread_ = caller_ == TFRING_TENSORFLOW_OP && on_pool_thread();
  std::lock_guard<std::mutex> lock(control_mutex_);
  if (fails_from_ <= sequence_ + 1) {
    const bool told = told_;
    told_ = true;
    if (!told) return failure_;
    return {failure_.code, "ring \"" + name_ + "\" can no longer be used: " + failure_.message};
  }
  header_ = make_header(kind, call, tensors, num_tensors, ++sequence_);
  begun_ = sequence_ + 1;
  running_ = true;
  statistics_.collectives[static_cast<int>(kind)] += 1;
  return {};
}

template <typename Body>
Status Ring::run(Kind kind, const tfring_call& call, const tfring_tensor* tensors, int num_tensors,
                 Body body) {
  TFRING_TRY(enter(call));
  Status status = begin(kind, call, tensors, num_tensors);
  if (status.ok()) {
    status = body();
    std::lock_guard<std::mutex> lock(control_mutex_);
    running_ = false;
    if (status.ok()) ++finished_;
    if (!status.ok()) told_ = true;
  }
  leave();
  return status;
}

Status Ring::all_reduce(const tfring_call& call, const tfring_tensor* tensors, int num_tensors) {
  return run(Kind::kAllReduce, call, tensors, num_tensors, [&] {
    return is_small(num_bytes(tensors, num_tensors), world_size_)
               ? small_all_reduce(call, tensors, num_tensors)
               : large_all_reduce(call, tensors, num_tensors);
  });
}
Status Ring::all_gather(const tfring_call& call, const tfring_tensor* tensors, int num_tensors,
                        tfring_place place, void* context) {
  return run(Kind::kAllGather, call, tensors, num_tensors,
             [&] { return run_all_gather(tensors, num_tensors, place, context); });
}
Status Ring::reduce_scatter(const tfring_call& call, const tfring_tensor& tensor) {
  return run(Kind::kReduceScatter, call, &tensor, 1, [&] { return run_reduce_scatter(call, tensor); });
}
Status Ring::broadcast(const tfring_call& call, const tfring_tensor* tensors, int num_tensors) {
  return run(Kind::kBroadcast, call, tensors, num_tensors,
             [&] { return run_broadcast(call, tensors, num_tensors); });
}
Status Ring::barrier(const tfring_call& call) {
  return run(Kind::kBarrier, call, nullptr, 0, [&] { return small_all_reduce(call, nullptr, 0); });
}

// Every contribution goes round whole; each rank then adds them up in rank order.
Status Ring::small_all_reduce(const tfring_call& call, const tfring_tensor* tensors, int num_tensors) {
  const int64_t size = num_bytes(tensors, num_tensors);
  TFRING_TRY(need_scratch(size * world_size_));
  char* const all = scratch_.get();
  char* mine = all + rank_ * size;
  for (int t = 0; t < num_tensors; ++t) {
    copy(mine, contribution(call, tensors[t]), num_bytes(tensors[t]));
    mine += num_bytes(tensors[t]);
  }
  plan_.spans.add(all, all, size * world_size_);
  for (int s = 0; s < num_all_gather_steps(world_size_); ++s) {
    const ScheduleStep step = all_gather_step(rank_, world_size_, s);
    plan_.steps.push_back({{step.send * size, size}, {step.recv * size, size}, true, true, false, false});
  }
  TFRING_TRY(execute(kWithHeader));
  const int64_t count = size / size_of(plan_.dtype);
  std::vector<const void*> parts(static_cast<size_t>(world_size_));
  for (int r = 0; r < world_size_; ++r) parts[static_cast<size_t>(r)] = all + r * size;
  reduce_many(plan_.dtype, plan_.op, all, parts.data(), world_size_, count);
  const char* sum = all;
  for (int t = 0; t < num_tensors; ++t) {
    copy(tensors[t].output, sum, num_bytes(tensors[t]));
    sum += num_bytes(tensors[t]);
  }
  return {};
}

// Reduce-scatter, then all-gather, as one stream of 2 (N - 1) steps. Each chunk is added up on its way round,
// one rank after the other, and the sum is passed on, so all ranks hold the same bits. The input is read
// where it lies: the addition writes the output.
Status Ring::large_all_reduce(const tfring_call& call, const tfring_tensor* tensors, int num_tensors) {
  for (int t = 0; t < num_tensors; ++t) {
    const void* input = contribution(call, tensors[t]);
    if (world_size_ == 1) copy(tensors[t].output, input, num_bytes(tensors[t]));
    plan_.spans.add(input, tensors[t].output, num_bytes(tensors[t]));
  }
  const int64_t item = size_of(plan_.dtype);
  const auto bytes_of = [&](int chunk) {
    const Range range = chunk_of(plan_.spans.size() / item, world_size_, chunk);
    return Range{range.begin * item, range.size * item};
  };
  for (int s = 0; s < num_all_reduce_steps(world_size_); ++s) {
    const ScheduleStep step = all_reduce_step(rank_, world_size_, s);
    plan_.steps.push_back({bytes_of(step.send), bytes_of(step.recv), true, true, s == 0, step.reduce});
  }
  return execute(kWithHeader);
}

// As the first half of an all_reduce, one chunk further on, so that rank r ends with chunk r. Partial sums
// live in two scratch buffers used in turn.
Status Ring::run_reduce_scatter(const tfring_call& call, const tfring_tensor& tensor) {
  const int64_t row = row_bytes(tensor);
  const int num_steps = num_reduce_scatter_steps(world_size_);
  const int64_t largest = chunk_of(tensor.dims[0], world_size_, 0).size * row;
  if (num_steps > 1) TFRING_TRY(need_scratch(2 * largest));
  const char* input = static_cast<const char*>(contribution(call, tensor));
  if (world_size_ == 1) copy(tensor.output, input, num_bytes(tensor));
  const auto bytes_of = [&](int chunk) {
    const Range range = chunk_of(tensor.dims[0], world_size_, chunk);
    return Range{range.begin * row, range.size * row};
  };
  for (int chunk = 0; chunk < world_size_; ++chunk) {
    const int s = wrap(rank_ - chunk - 2, world_size_);  // the step that receives this chunk
    const Range range = bytes_of(chunk);
    char* out = chunk == rank_ ? static_cast<char*>(tensor.output) : scratch_.get();
    if (chunk != rank_ && num_steps > 1) out += (s % 2) * largest;
    plan_.spans.add(input == nullptr ? nullptr : input + range.begin, out, range.size);
  }
  for (int s = 0; s < num_steps; ++s) {
    const ScheduleStep step = reduce_scatter_step(rank_, world_size_, s);
    plan_.steps.push_back({bytes_of(step.send), bytes_of(step.recv), true, true, s == 0, true});
  }
  return execute(kWithHeader);
}

Status Ring::run_broadcast(const tfring_call& call, const tfring_tensor* tensors, int num_tensors) {
  const bool is_root = rank_ == call.root;
  for (int t = 0; t < num_tensors; ++t) {
    plan_.spans.add(tensors[t].input, tensors[t].output, num_bytes(tensors[t]));
  }
  const Range chunks[2] = {{0, plan_.spans.size()}, {0, 0}};
  for (int s = 0; s < num_broadcast_steps() && world_size_ > 1; ++s) {
    const ScheduleStep step = broadcast_step(rank_, world_size_, call.root, s);
    plan_.steps.push_back({step.send < 0 ? Range{} : chunks[step.send],
                           step.recv < 0 ? Range{} : chunks[step.recv], step.send >= 0, step.recv >= 0,
                           is_root, false});
  }
  TFRING_TRY(execute(kWithHeader));
  for (int t = 0; t < num_tensors && is_root; ++t) {
    copy(tensors[t].output, tensors[t].input, num_bytes(tensors[t]));
  }
  return {};
}

}  // namespace tfring
