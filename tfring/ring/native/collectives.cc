// The plans of the collectives, made before they run.
#include "collectives.h"

#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "kinds.h"
#include "tensor.h"
#include "trace.h"

namespace tfring {
namespace {

// Returns the contribution of this rank: null, which means zeros, if it is inactive.
const void* contribution(const tfring_call& call, const tfring_tensor& tensor) {
  return call.inactive ? nullptr : tensor.input;
}

void put_together(char* to, const tfring_call& call, const tfring_tensor* tensors, int num_tensors) {
  for (int t = 0; t < num_tensors; ++t) {
    copy(to, contribution(call, tensors[t]), num_bytes(tensors[t]));
    to += num_bytes(tensors[t]);
  }
}

void take_apart(const char* from, const tfring_tensor* tensors, int num_tensors) {
  for (int t = 0; t < num_tensors; ++t) {
    copy(tensors[t].output, from, num_bytes(tensors[t]));
    from += num_bytes(tensors[t]);
  }
}

// Divides bytes into parts of equal size, as far as full items allow.
void cut(int64_t num_bytes, int64_t item, int num_parts, std::vector<Range>* chunks) {
  chunks->clear();
  for (int c = 0; c < num_parts; ++c) {
    const Range range = chunk_of(num_bytes / item, num_parts, c);
    chunks->push_back({range.begin * item, range.size * item});
  }
}

}  // namespace

Status Collectives::run(const tfring_call& call, const tfring_tensor* tensors, int num_tensors) {
  switch (static_cast<Kind>(call.kind)) {
    case Kind::kAllReduce:
      return all_reduce(call, tensors, num_tensors);
    case Kind::kReduce:
      return reduce(call, tensors, num_tensors);
    case Kind::kReduceScatter:
      return reduce_scatter(call, tensors, num_tensors);
    case Kind::kBroadcast:
      return broadcast(call, tensors, num_tensors);
    case Kind::kBarrier:
      return small_all_reduce(call, nullptr, 0);
    default:
      return execution_.fail(Code::kInternal, "the ring has no plan for " + execution_.here());
  }
}

Status Collectives::all_reduce(const tfring_call& call, const tfring_tensor* tensors, int num_tensors) {
  const Group& group = execution_.group();
  const int64_t size = num_bytes(tensors, num_tensors);
  if (call.compression != 0 && group.size() > 1 && !is_small(size, group.size())) {
    return compressed_all_reduce(call, tensors, num_tensors);
  }
  const Algorithm algorithm =
      choose_all_reduce(execution_.settings().algorithm, size, group.size(), group.local_size);
  return algorithm == Algorithm::kFlat || algorithm == Algorithm::kBruck
             ? small_all_reduce(call, tensors, num_tensors)
             : large_all_reduce(algorithm, call, tensors, num_tensors);
}

Status Collectives::need_scratch(int64_t size) {
  if (scratch_.reserve(size)) return {};
  return execution_.fail(Code::kInternal, "rank " + std::to_string(execution_.settings().rank) +
                                              " has no memory for " + std::to_string(size) +
                                              " bytes of scratch in " + execution_.here());
}

// Sends every member's slot of the scratch to every other. Slots are in the order of the members.
Status Collectives::gather_slots(int64_t slot) {
  const Group& group = execution_.group();
  Plan& plan = execution_.plan();
  const int size = group.size();
  const int64_t begin = plan.spans.size();
  plan.spans.add(scratch_.get(), scratch_.get(), slot * size);
  chunks_.clear();
  for (int member : group.member_at) chunks_.push_back({begin + member * slot, slot});
  if (choose_small(execution_.settings().algorithm, size) == Algorithm::kFlat) {
    flat_all_gather(group.position, size, &schedule_);
  } else {
    bruck_all_gather(group.position, size, &schedule_);
  }
  plan.add(schedule_, group.order, chunks_);
  return execution_.execute(Until::kDone);
}

// Each member adds up all contributions, in the order of the members.
Status Collectives::small_all_reduce(const tfring_call& call, const tfring_tensor* tensors, int num_tensors) {
  const Group& group = execution_.group();
  const int64_t slot = num_bytes(tensors, num_tensors);
  TFRING_TRY(need_scratch(slot * group.size()));
  char* const all = scratch_.get();
  put_together(all + group.member * slot, call, tensors, num_tensors);
  TFRING_TRY(gather_slots(slot));
  add_slots_up(slot);
  take_apart(all, tensors, num_tensors);
  return {};
}

void Collectives::add_slots_up(int64_t slot) {
  const Group& group = execution_.group();
  Plan& plan = execution_.plan();
  const Stopwatch stopwatch(execution_.record().adding());
  slots_.clear();
  for (int m = 0; m < group.size(); ++m) slots_.push_back(scratch_.get() + m * slot);
  reduce_many(plan.dtype, plan.op, scratch_.get(), slots_.data(), group.size(), slot / size_of(plan.dtype));
}

// Reduce-scatter, then all-gather, as one stream. Each chunk is added up by one member after the other, and
// the sum is passed on, so all hold the same bits. The input is read in place; the addition writes the
// output.
Status Collectives::large_all_reduce(Algorithm algorithm, const tfring_call& call,
                                     const tfring_tensor* tensors, int num_tensors) {
  const Group& group = execution_.group();
  Plan& plan = execution_.plan();
  const int size = group.size();
  for (int t = 0; t < num_tensors; ++t) {
    const void* input = contribution(call, tensors[t]);
    if (size == 1) copy(tensors[t].output, input, num_bytes(tensors[t]));
    plan.spans.add(input, tensors[t].output, num_bytes(tensors[t]));
  }
  const int num_chunks = algorithm == Algorithm::kHalving ? halving_chunks(size) : size;
  cut(plan.spans.size(), size_of(plan.dtype), num_chunks, &chunks_);
  if (algorithm == Algorithm::kHalving) {
    halving_all_reduce(group.position, size, &schedule_);
  } else if (algorithm == Algorithm::kTwoLevel) {
    two_level_all_reduce(group.position, size, group.local_size, &schedule_);
  } else {
    ring_all_reduce(group.position, size, &schedule_);
  }
  plan.add(schedule_, group.order, chunks_);
  return execution_.execute(Until::kDone);
}

// Each member receives the contributions to one chunk from all others, in 16 bits, adds them up in float32,
// and sends the sum, rounded once, to all: each number is rounded once in each direction.
Status Collectives::compressed_all_reduce(const tfring_call& call, const tfring_tensor* tensors,
                                          int num_tensors) {
  const Group& group = execution_.group();
  Plan& plan = execution_.plan();
  constexpr int64_t kItem = 2;
  const DType wire = static_cast<DType>(call.compression);
  const int size = group.size();
  const int64_t total = num_bytes(tensors, num_tensors) / static_cast<int64_t>(sizeof(float)) * kItem;
  cut(total, kItem, size, &chunks_);
  const Range mine = chunks_[static_cast<size_t>(group.member)];
  TFRING_TRY(need_scratch(total + size * mine.size));
  char* const all = scratch_.get();
  char* const slots = all + total;  // [member]: its contribution to this one's chunk
  char* to = all;
  for (int t = 0; t < num_tensors; ++t) {
    const int64_t count = num_bytes(tensors[t]) / static_cast<int64_t>(sizeof(float));
    if (call.inactive) {
      copy(to, nullptr, count * kItem);
    } else {
      const Stopwatch stopwatch(execution_.record().adding());
      narrow(wire, to, static_cast<const float*>(tensors[t].input), count);
    }
    to += count * kItem;
  }
  plan.spans.add(all, all, total);
  plan.spans.add(slots, slots, size * mine.size);
  for (int s = 1; s < size; ++s) {
    const int sends_to = (group.member + s) % size;
    const int takes_from = (group.member - s + size) % size;
    plan.add_send(group.rank_of(sends_to), chunks_[static_cast<size_t>(sends_to)]);
    plan.add_recv(group.rank_of(takes_from), {total + takes_from * mine.size, mine.size});
  }
  TFRING_TRY(execution_.execute(Until::kReceived));
  copy(slots + group.member * mine.size, all + mine.begin, mine.size);
  slots_.clear();
  for (int m = 0; m < size; ++m) slots_.push_back(slots + m * mine.size);
  {
    const Stopwatch stopwatch(execution_.record().adding());
    reduce_many(wire, Op::kSum, all + mine.begin, slots_.data(), size, mine.size / kItem);
  }
  // A chunk is received only after it was sent, so it may be received into the same memory.
  for (int s = 1; s < size; ++s) {
    const int sends_to = (group.member + s) % size;
    const int takes_from = (group.member - s + size) % size;
    plan.add_send(group.rank_of(sends_to), mine);
    plan.add_recv(group.rank_of(takes_from), chunks_[static_cast<size_t>(takes_from)]);
  }
  TFRING_TRY(execution_.execute(Until::kDone));
  const Stopwatch stopwatch(execution_.record().adding());
  const char* from = all;
  for (int t = 0; t < num_tensors; ++t) {
    const int64_t count = num_bytes(tensors[t]) / static_cast<int64_t>(sizeof(float));
    widen(wire, static_cast<float*>(tensors[t].output), from, count);
    from += count * kItem;
  }
  return {};
}

// Small contributions are sent to the root, which adds them up in the order of the members. With many
// members, or large contributions, the sum is computed on the way to the root.
Status Collectives::reduce(const tfring_call& call, const tfring_tensor* tensors, int num_tensors) {
  const Group& group = execution_.group();
  Plan& plan = execution_.plan();
  const int size = group.size();
  const bool is_root = group.member == call.root;
  const int root = group.rank_of(call.root);
  const int64_t slot = num_bytes(tensors, num_tensors);
  const Algorithm algorithm = choose_rooted(slot, size);
  execution_.record().took(algorithm);
  if (algorithm == Algorithm::kFlat) {
    TFRING_TRY(need_scratch(slot * size));
    char* const all = scratch_.get();
    put_together(all + group.member * slot, call, tensors, num_tensors);
    plan.spans.add(all, all, slot * size);
    if (!is_root) {
      plan.add_send(root, {group.member * slot, slot});
      plan.add_recv(root, {});  // acknowledgement of the same call
    }
    for (int m = 0; m < size && is_root; ++m) {
      if (m == call.root) continue;
      plan.add_recv(group.rank_of(m), {m * slot, slot});
      plan.add_send(group.rank_of(m), {});
    }
    TFRING_TRY(execution_.execute(Until::kDone));
    if (!is_root) return {};
    add_slots_up(slot);
    take_apart(all, tensors, num_tensors);
    return {};
  }
  if (!is_root) TFRING_TRY(need_scratch(slot));
  char* partial = scratch_.get();
  for (int t = 0; t < num_tensors; ++t) {
    const void* input = contribution(call, tensors[t]);
    if (size == 1) copy(tensors[t].output, input, num_bytes(tensors[t]));
    plan.spans.add(input, is_root ? tensors[t].output : partial, num_bytes(tensors[t]));
    partial += num_bytes(tensors[t]);
  }
  chunks_.assign(1, {0, plan.spans.size()});
  const auto make = algorithm == Algorithm::kTree ? tree_reduce : ring_reduce;
  make(group.position, size, group.position_of(call.root), &schedule_);
  for (const ScheduleStep& step : schedule_) {  // receivers acknowledge that they make the same call
    if (step.from >= 0) plan.add_send(group.order[static_cast<size_t>(step.from)], {});
    if (step.to >= 0) plan.add_recv(group.order[static_cast<size_t>(step.to)], {});
  }
  plan.add(schedule_, group.order, chunks_);
  return execution_.execute(Until::kDone);
}

// Runs the first half of an all_reduce, shifted by one chunk, so that each member ends with its own. Partial
// sums alternate between two parts of the scratch.
Status Collectives::reduce_scatter(const tfring_call& call, const tfring_tensor* tensors, int num_tensors) {
  const Group& group = execution_.group();
  Plan& plan = execution_.plan();
  const int size = group.size();
  const auto rows_of = [&](const tfring_tensor& tensor, int member) {
    const int64_t row = row_bytes(tensor);
    const Range range = chunk_of(tensor.dims[0], size, member);
    return Range{range.begin * row, range.size * row};
  };
  int64_t largest = 0;  // the first member has the largest share of every tensor
  for (int t = 0; t < num_tensors; ++t) largest += rows_of(tensors[t], 0).size;
  if (size > 2) TFRING_TRY(need_scratch(2 * largest));
  chunks_.clear();
  for (int p = 0; p < size; ++p) {
    const int member = group.member_at[static_cast<size_t>(p)];
    const int step = (group.position - p - 2 + 2 * size) % size;  // in which this chunk is received
    const int64_t begin = plan.spans.size();
    char* partial = size > 2 ? scratch_.get() + (step % 2) * largest : nullptr;
    for (int t = 0; t < num_tensors; ++t) {
      const Range range = rows_of(tensors[t], member);
      const char* input = static_cast<const char*>(contribution(call, tensors[t]));
      if (input != nullptr) input += range.begin;
      const bool mine = p == group.position;
      if (mine && size == 1) copy(tensors[t].output, input, range.size);
      plan.spans.add(input, mine ? tensors[t].output : partial, range.size);
      if (partial != nullptr) partial += range.size;
    }
    chunks_.push_back({begin, plan.spans.size() - begin});
  }
  ring_reduce_scatter(group.position, size, &schedule_);
  plan.add(schedule_, group.order, chunks_, true);
  return execution_.execute(Until::kDone);
}

// Small values are sent from the root to each member, or by a tree among many members. Large values stream
// from one member to the next. The root receives acknowledgements, so that it learns of a rank that
// disagrees.
Status Collectives::broadcast(const tfring_call& call, const tfring_tensor* tensors, int num_tensors) {
  const Group& group = execution_.group();
  Plan& plan = execution_.plan();
  const int size = group.size();
  const bool is_root = group.member == call.root;
  for (int t = 0; t < num_tensors; ++t) {
    plan.spans.add(tensors[t].input, tensors[t].output, num_bytes(tensors[t]));
  }
  const int64_t total = plan.spans.size();
  chunks_.assign({{0, total}, {0, 0}});
  const int root = group.position_of(call.root);
  const Algorithm algorithm = choose_rooted(total, size);
  execution_.record().took(algorithm);
  const auto make = algorithm == Algorithm::kFlat   ? flat_broadcast
                    : algorithm == Algorithm::kTree ? tree_broadcast
                                                    : ring_broadcast;
  make(group.position, size, root, &schedule_);
  plan.add(schedule_, group.order, chunks_);
  for (Transfer& send : plan.sends) {
    if (send.after < 0 && !is_root) send.after = 0;  // the acknowledgement follows the data
  }
  TFRING_TRY(execution_.execute(Until::kDone));
  for (int t = 0; t < num_tensors && is_root; ++t) {
    copy(tensors[t].output, tensors[t].input, num_bytes(tensors[t]));
  }
  return {};
}

}  // namespace tfring
