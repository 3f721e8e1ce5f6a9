// Opening and closing, and the begin and end of calls.
#include "world.h"

#include <mutex>
#include <new>
#include <string>

#include "clock.h"

namespace tfring {
namespace {

// Validates a call without the other ranks. A rank that is rejected here has not begun, and may continue.
Status check(int rank, const Group& group, const tfring_call& call, const tfring_tensor* tensors,
             int num_tensors) {
  if (call.kind < 0 || call.kind >= kNumKinds) {
    return {Code::kInvalid, "the ring has no collective number " + std::to_string(call.kind)};
  }
  const Kind kind = static_cast<Kind>(call.kind);
  const auto invalid = [&](const std::string& rule) {
    return Status(Code::kInvalid, std::string(name_of(kind)) + " \"" + call.name + "\": " + rule);
  };
  if (group.member < 0) {
    return invalid("rank " + std::to_string(rank) + " is not in group \"" + group.name + "\"");
  }
  for (int t = 0; t < num_tensors; ++t) {
    const DType dtype = static_cast<DType>(tensors[t].dtype);
    if (size_of(dtype) == 0)
      return invalid("the ring does not support dtype number " + std::to_string(tensors[t].dtype));
    if (reduces(kind) && !can_reduce(dtype, static_cast<Op>(call.op))) {
      if (dtype != DType::kBool)
        return invalid(std::string("numbers of ") + name_of(dtype) + " have no order");
      return invalid(
          "bool has no sum and no product. Use op=\"max\" for any, op=\"min\" for all, or cast to an integer "
          "to count");
    }
    if (reduces(kind) && tensors[t].dtype != tensors[0].dtype) {
      return invalid(std::string("tensors reduced together are of ") +
                     name_of(static_cast<DType>(tensors[0].dtype)) + " and " + name_of(dtype) +
                     ", not of one dtype");
    }
    if (by_rows(kind) && tensors[t].num_dims == 0) {
      return invalid("a scalar has no rows. Pass tensors of at least one dimension");
    }
    if (kind == Kind::kSend && tensors[t].num_dims > kMaxDims) {
      return invalid("a tensor has " + std::to_string(tensors[t].num_dims) +
                     " dimensions, but those sent have at most " + std::to_string(kMaxDims));
    }
  }
  if (kind == Kind::kAllReduceRows) TFRING_TRY(RowSums::check(call, tensors, num_tensors, group.size()));
  if (call.compression != 0) {
    const DType wire = static_cast<DType>(call.compression);
    if (kind != Kind::kAllReduce || static_cast<Op>(call.op) != Op::kSum ||
        tensors[0].dtype != static_cast<int>(DType::kFloat32) ||
        (wire != DType::kBfloat16 && wire != DType::kFloat16)) {
      return invalid(std::string("a ") + name_of(static_cast<Op>(call.op)) + " of " +
                     name_of(static_cast<DType>(tensors[0].dtype)) + " cannot be compressed to " +
                     name_of(wire) + ". Only sums of float32 can, to bfloat16 or float16");
    }
  }
  if (has_root(kind) && (call.root < 0 || call.root >= group.size())) {
    const std::string what = kind == Kind::kSend ? "to" : kind == Kind::kReceive ? "source" : "root";
    return invalid(what + "=" + std::to_string(call.root) + " is not from 0 to " +
                   std::to_string(group.size() - 1));
  }
  if (is_pairwise(kind) && call.root == group.member) {
    return invalid("the peer is this rank, " + std::to_string(call.root) + ". It must be another rank");
  }
  return {};
}

}  // namespace

World::World(const tfring_options& options)
    : settings_(options),
      liveness_(settings_, &wake_event_),
      call_lock_(settings_, wake_event_),
      execution_(settings_, &liveness_, &wake_event_),
      collectives_(&execution_),
      exchange_(&execution_, &collectives_),
      row_reduction_(&execution_, &exchange_) {
  state_.name = settings_.name;
}

World::~World() { close(); }

Status World::open(const tfring_options& options, std::shared_ptr<World>* world,
                   std::shared_ptr<Group>* all) {
  world->reset(new World(options));
  *all = make_group_of_all((*world)->settings_);
  return (*world)->connect(options, all->get());
}

Status World::connect(const tfring_options& options, Group* all) {
  Status status;
  for (int i = 0; i < options.num_links; ++i) {  // all links, because each holds descriptors
    const Status added = add_link(options.links[i], false);
    if (status.ok()) status = added;
  }
  if (settings_.world_size > 1) {
    Status ready;
    if (!wake_event_.open()) ready = {Code::kInternal, "no descriptor is left for the ring"};
    join_ring(settings_.identity, &state_);
    if (ready.ok()) ready = watch_over(this);
    if (!ready.ok()) return liveness_.lock()->break_up(ready);
  }
  TFRING_TRY(status);
  execution_.waiting().set_timeout(options.opening_timeout_seconds);
  tfring_call opening{};
  opening.name = "opening";
  opening.kind = static_cast<int32_t>(Kind::kBarrier);
  opening.caller = TFRING_PYTHON_MAIN_THREAD;
  TFRING_TRY(run(all, opening, nullptr, 0, nullptr, nullptr, nullptr));
  execution_.statistics() = tfring_statistics{};
  execution_.waiting().set_timeout(settings_.timeout_seconds);
  if (settings_.world_size > 1) {
    liveness_.lock()->start_asking(now_nanoseconds());
    wake_watcher();
  }
  return {};
}

// May run during a call, which does not use these links: it uses those that existed when it began.
Status World::add_link(const tfring_link& from, bool is_open) {
  auto peer = std::make_unique<Peer>(from, settings_.lost_seconds);
  std::unique_ptr<Link> link;
  TFRING_TRY(Link::open(from, settings_.rank, &link));
  const auto liveness = liveness_.lock();
  if (is_open) TFRING_TRY(liveness->send_hello(peer.get()));
  liveness->add(std::move(peer));
  execution_.links().add(std::move(link));
  return {};
}

Status World::adopt_link(const tfring_link& link) {
  TFRING_TRY(add_link(link, true));
  wake_watcher();
  return {};
}

std::shared_ptr<Group> World::make_group(const Group& parent, const int32_t* members, int num_members,
                                         const char* name) const {
  return tfring::make_group(settings_, parent, members, num_members, name);
}

// Ends a call in another thread, waits for its end, and sends a closing frame. From within a call of this
// thread it only ends that call; the last owner of the world releases it.
void World::close() {
  wake_event_.announce_close();
  if (call_lock_.is_this_threads()) return;
  call_lock_.wait();
  unwatch(this);
  const auto liveness = liveness_.lock();
  if (!liveness->close()) return;
  if (settings_.world_size > 1) leave_ring(&state_);
  execution_.links().close();
}

tfring_statistics World::statistics() {
  std::unique_lock<std::mutex> lock;
  if (!call_lock_.is_this_threads()) lock = call_lock_.wait();  // otherwise this is a signal handler
  tfring_statistics statistics = execution_.statistics();
  statistics.scratch_bytes = collectives_.scratch_bytes() + row_reduction_.scratch_bytes();
  return statistics;
}

void World::abort(const Status& why) { (void)liveness_.lock()->break_up(why); }

void World::tell_raised(const std::string& error) { liveness_.lock()->tell_raised(error); }

Status World::failure() { return liveness_.lock()->failure(); }

void World::hear(int rank, int64_t now) { liveness_.lock()->hear(rank, now); }

int World::watch(int64_t now, int64_t late, const Poll& poll) {
  return liveness_.lock()->watch(now, late, poll);
}

Status World::run(Group* group, const tfring_call& call, const tfring_tensor* tensors, int num_tensors,
                  const int64_t* counts, tfring_allocate allocate, void* context) {
  const bool is_barrier = call.kind == static_cast<int32_t>(Kind::kBarrier);
  CallLock::Claim claim(&call_lock_, call, is_barrier ? nullptr : group);
  const Status taken = claim.take();
  if (!taken.ok()) return taken.code == Code::kMismatch ? liveness_.lock()->break_up(taken) : taken;
  Status status;
  bool has_begun = true;
  try {
    status = begin(group, call, tensors, num_tensors);
    has_begun = status.ok();
    if (has_begun) status = run_begun(call, tensors, num_tensors, counts, allocate, context);
  } catch (const std::bad_alloc&) {  // possibly after the call was counted, so the ring is unusable
    status = execution_.fail_without_memory();
  }
  const Status settled = claim.settle();
  if (status.ok() && !settled.ok()) status = liveness_.lock()->break_up(settled);
  if (has_begun) end(status);
  return status;
}

Status World::begin(Group* group, const tfring_call& call, const tfring_tensor* tensors, int num_tensors) {
  TFRING_TRY(check(settings_.rank, *group, call, tensors, num_tensors));
  const Kind kind = static_cast<Kind>(call.kind);
  Plan& plan = execution_.plan();
  plan.clear(settings_.world_size);
  plan.dtype = num_tensors > 0 ? static_cast<DType>(tensors[0].dtype) : DType::kUint8;
  plan.op = static_cast<Op>(call.op);
  Call& begun = execution_.call();
  begun.group = group;
  begun.caller = call.caller;
  begun.is_of_all = group->size() == settings_.world_size && !is_pairwise(kind);
  begun.is_on_pool_thread = begun.is_of_all && call.caller == TFRING_TENSORFLOW_OP && on_pool_thread();
  {
    const auto liveness = liveness_.lock();
    TFRING_TRY(liveness->check_usable());
    const uint64_t sequence = liveness->calls().count(kind, call.root, group);
    if (call.sequence != nullptr) *call.sequence = sequence;
    begun.header = make_header(*group, call, tensors, num_tensors, sequence);
    begun.header.algorithm = static_cast<uint8_t>(settings_.algorithm);
    if (kind == Kind::kAllReduceRows) {
      begun.header.op = static_cast<uint8_t>(choose_way(*group, call, begun.header));
    }
    if (begun.is_of_all) ++state_.begun;
    TFRING_TRY(liveness->begin(begun.header));
  }
  execution_.statistics().collectives[static_cast<int>(kind)] += 1;
  execution_.record().start(settings_, begun, call, tensors, num_tensors, execution_.statistics());
  return {};
}

void World::end(const Status& status) {
  execution_.record().finish(status, execution_.statistics());
  liveness_.lock()->end(status);
}

Status World::run_begun(const tfring_call& call, const tfring_tensor* tensors, int num_tensors,
                        const int64_t* counts, tfring_allocate allocate, void* context) {
  const Kind kind = static_cast<Kind>(call.kind);
  if (kind == Kind::kAllReduceRows)
    return row_reduction_.all_reduce_rows(call, tensors, num_tensors, allocate, context);
  if (learns_rows(kind) || is_pairwise(kind))
    return exchange_.run(call, tensors, num_tensors, counts, allocate, context);
  return collectives_.run(call, tensors, num_tensors);
}

}  // namespace tfring
