// Collectives with sizes that ranks learn on the way: every rank's numbers of rows come first, directly
// followed by the rows. Between the two the caller is asked for memory.
#include "exchange.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "tensor.h"

namespace tfring {

// Numbers of rows of each tensor that members send to each other.
struct Exchange::Rows {
  Kind kind;
  int root;  // the member that receives or sends all rows, -1 for none
  int member;
  int size;
  const tfring_tensor* tensors;
  size_t count;                    // of tensors
  std::vector<int64_t> row_bytes;  // [tensor]
  std::vector<int64_t> mine;       // [member][tensor]: sent to it
  std::vector<int64_t> theirs;     // [member][tensor]: received from it
  int64_t most_beside = 0;         // bytes sent with the numbers, if they are all rows of a member

  bool gives(int from, int to) const {
    if (kind == Kind::kGather) return to == root;
    if (kind == Kind::kScatter) return from == root;
    return true;
  }
  int64_t theirs_bytes(int from, size_t tensor) const {
    return theirs[static_cast<size_t>(from) * count + tensor] * row_bytes[tensor];
  }
  int64_t theirs_bytes(int from) const {
    int64_t total = 0;
    for (size_t t = 0; t < count; ++t) total += theirs_bytes(from, t);
    return total;
  }
  bool comes_beside(int from) const { return most_beside > 0 && theirs_bytes(from) <= most_beside; }
  // An all_gather sends large blocks along a ring, because all members need each of them.
  bool is_sent_around(int from) const {
    if (kind != Kind::kAllGather || comes_beside(from)) return false;
    return size > kFlatMembers || !is_small(theirs_bytes(from), size);
  }
};

Status Exchange::run(const tfring_call& call, const tfring_tensor* tensors, int num_tensors,
                     const int64_t* counts, tfring_allocate allocate, void* context) {
  switch (static_cast<Kind>(call.kind)) {
    case Kind::kSend:
      return send(call, *tensors);
    case Kind::kReceive:
      return receive(call, allocate, context);
    default:
      return exchange(call, tensors, num_tensors, counts, allocate, context);
  }
}

// Rows of tensors: an all_gather, gather, scatter or all_to_all.
Status Exchange::exchange(const tfring_call& call, const tfring_tensor* tensors, int num_tensors,
                          const int64_t* counts, tfring_allocate allocate, void* context) {
  const Kind kind = static_cast<Kind>(call.kind);
  const Group& group = execution_.group();
  Rows rows{kind,    has_root(kind) ? call.root : -1,  group.member, group.size(),
            tensors, static_cast<size_t>(num_tensors), {},           {},
            {}};
  const size_t size = static_cast<size_t>(rows.size);
  rows.mine.assign(size * rows.count, 0);
  rows.theirs.assign(size * rows.count, 0);
  for (size_t t = 0; t < rows.count; ++t) {
    rows.row_bytes.push_back(row_bytes(tensors[t]));
    for (size_t m = 0; m < size; ++m) {
      if (!rows.gives(rows.member, static_cast<int>(m))) continue;
      rows.mine[m * rows.count + t] = counts == nullptr ? tensors[t].dims[0] : counts[m * rows.count + t];
    }
  }
  const size_t mine = static_cast<size_t>(rows.member) * rows.count;
  std::copy_n(rows.mine.begin() + static_cast<int64_t>(mine), rows.count,
              rows.theirs.begin() + static_cast<int64_t>(mine));
  TFRING_TRY(announce_rows(&rows));
  TFRING_TRY(check_rows(rows));
  std::vector<void*> outputs(rows.count);
  if (kind != Kind::kGather || rows.root == rows.member) {
    TFRING_TRY(request_outputs(rows.theirs, allocate, context, outputs.data()));
    take_rows(rows, outputs.data());
  }
  return execution_.execute(Until::kDone);
}

// Sends bytes to each member, or all bytes to all, and receives theirs into `to`, in the order of the
// members.
Status Exchange::exchange_bytes(Kind kind, const char* bytes, const std::vector<int64_t>& sizes, Memory* to,
                                std::vector<int64_t>* theirs) {
  const Group& group = execution_.group();
  const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  const tfring_tensor tensor{bytes, nullptr, &total, 1, static_cast<int32_t>(DType::kUint8)};
  const size_t size = static_cast<size_t>(group.size());
  Rows rows{kind, -1, group.member, group.size(), &tensor, 1, {1}, sizes, std::vector<int64_t>(size)};
  if (kind == Kind::kAllGather) rows.mine.assign(size, total);
  rows.theirs[static_cast<size_t>(group.member)] = rows.mine[static_cast<size_t>(group.member)];
  TFRING_TRY(announce_rows(&rows));
  TFRING_TRY(check_rows(rows));
  if (!to->reserve(std::accumulate(rows.theirs.begin(), rows.theirs.end(), int64_t{0})))
    return execution_.fail_without_memory();
  void* const output = to->get();
  take_rows(rows, &output);
  *theirs = rows.theirs;
  return execution_.execute(Until::kDone);
}

// Begins to send numbers, followed by rows, to each member. Returns when the numbers of all have arrived.
Status Exchange::announce_rows(Rows* rows) {
  const Group& group = execution_.group();
  Plan& plan = execution_.plan();
  const int64_t numbers = static_cast<int64_t>(rows->count * sizeof(int64_t));
  const bool flat = rows->kind != Kind::kAllGather || rows->size <= kFlatMembers;
  if (!flat) {
    rows->most_beside = kSmallBytes / 4 / rows->size;
    const int64_t slot = numbers + rows->most_beside;
    TFRING_TRY(collectives_.need_scratch(slot * rows->size));
    char* to = collectives_.scratch() + rows->member * slot;
    copy(to, rows->theirs.data() + rows->member * rows->count, numbers);
    copy(to + numbers, nullptr, rows->most_beside);
    to += numbers;
    for (size_t t = 0; t < rows->count && rows->comes_beside(rows->member); ++t) {
      copy(to, rows->tensors[t].input, rows->theirs_bytes(rows->member, t));
      to += rows->theirs_bytes(rows->member, t);
    }
    TFRING_TRY(collectives_.gather_slots(slot));
    for (size_t m = 0; m < static_cast<size_t>(rows->size); ++m) {
      copy(rows->theirs.data() + m * rows->count, collectives_.scratch() + m * slot, numbers);
    }
    return {};
  }
  const int64_t to = plan.spans.size();
  plan.spans.add(rows->mine.data(), rows->mine.data(), numbers * rows->size);
  const int64_t from = plan.spans.size();
  plan.spans.add(rows->theirs.data(), rows->theirs.data(), numbers * rows->size);
  std::vector<int64_t> begins(rows->count + 1);  // positions of the tensors in the spans
  for (size_t t = 0; t < rows->count; ++t) {
    const tfring_tensor& tensor = rows->tensors[t];
    int64_t total = 0;
    for (int m = 0; m < rows->size; ++m) total += rows->mine[static_cast<size_t>(m) * rows->count + t];
    if (rows->kind == Kind::kAllGather) total = tensor.dims[0];
    begins[t] = plan.spans.size();
    plan.spans.add(tensor.input, const_cast<void*>(tensor.input), total * rows->row_bytes[t]);
  }
  // Each begins with a different member, so that not all send to the same one at once.
  std::vector<int64_t> skipped(rows->count * static_cast<size_t>(rows->size));  // [member][tensor]: bytes
  for (size_t t = 0; t < rows->count && rows->kind != Kind::kAllGather; ++t) {
    int64_t before = 0;
    for (size_t m = 0; m < static_cast<size_t>(rows->size); ++m) {
      skipped[m * rows->count + t] = before;
      before += rows->mine[m * rows->count + t] * rows->row_bytes[t];
    }
  }
  for (int s = 1; s < rows->size; ++s) {
    const int sends_to = (rows->member + s) % rows->size;
    const int takes_from = (rows->member - s + rows->size) % rows->size;
    const int source = group.rank_of(takes_from);
    const int rank = group.rank_of(sends_to);
    if (rows->gives(takes_from, rows->member)) {
      plan.add_recv(source, {from + takes_from * numbers, numbers});
    } else if (rows->gives(rows->member, takes_from)) {
      plan.add_recv(source, {});  // acknowledgement of the same call
    }
    if (!rows->gives(rows->member, sends_to)) {
      if (rows->gives(sends_to, rows->member)) plan.add_send(rank, {});
      continue;
    }
    plan.add_send(rank, {to + sends_to * numbers, numbers});
    if (rows->is_sent_around(rows->member)) continue;
    for (size_t t = 0; t < rows->count; ++t) {
      const size_t at = static_cast<size_t>(sends_to) * rows->count + t;
      const int64_t size = rows->mine[at] * rows->row_bytes[t];
      if (size > 0) plan.add_send(rank, {begins[t] + skipped[at], size});
    }
  }
  return execution_.execute(Until::kReceived);
}

// The numbers came from another process, so the memory that they need must be checked.
Status Exchange::check_rows(const Rows& rows) const {
  const Group& group = execution_.group();
  for (int m = 0; m < rows.size; ++m) {
    int64_t total = 0;
    for (size_t t = 0; t < rows.count; ++t) {
      const int64_t number = rows.theirs[static_cast<size_t>(m) * rows.count + t];
      const int64_t left = std::numeric_limits<int64_t>::max() / (2 * rows.size) - total;
      if (number < 0 || number > left / std::max<int64_t>(rows.row_bytes[t], 1)) {
        return execution_.fail(Code::kInternal, "rank " + std::to_string(group.rank_of(m)) + " announced " +
                                                    std::to_string(number) + " rows in " + execution_.here());
      }
      total += number * rows.row_bytes[t];
    }
  }
  return {};
}

Status Exchange::request_outputs(const std::vector<int64_t>& numbers, tfring_allocate allocate, void* context,
                                 void** outputs) {
  // Otherwise Ctrl-C would be raised when `allocate` begins, and no caller could catch it.
  TFRING_TRY(execution_.waiting().look_up_at_once());
  int32_t placed = 0;
  allocate(context, numbers.data(), static_cast<int32_t>(numbers.size()), outputs, &placed);
  return placed == 0 ? execution_.waiting().interrupt() : Status();
}

// Computes the positions of the rows of each member.
void Exchange::take_rows(const Rows& rows, void* const* outputs) {
  const Group& group = execution_.group();
  Plan& plan = execution_.plan();
  std::vector<int64_t> filled(rows.count, 0);          // [tensor]: bytes of the output assigned so far
  chunks_.assign(static_cast<size_t>(rows.size), {});  // [position]: its range, in bytes
  const int64_t numbers = static_cast<int64_t>(rows.count * sizeof(int64_t));
  bool rounds = false;
  const int64_t before = plan.spans.size();
  std::vector<Range> blocks(static_cast<size_t>(rows.size));  // [member]
  for (int m = 0; m < rows.size; ++m) {
    const int64_t begin = plan.spans.size();
    const bool comes_beside = rows.comes_beside(m);
    const char* beside = collectives_.scratch() + (m + 1) * numbers + m * rows.most_beside;
    for (size_t t = 0; t < rows.count; ++t) {
      const int64_t size = rows.theirs_bytes(m, t);
      char* out = static_cast<char*>(outputs[t]) + filled[t];
      filled[t] += size;
      if (size == 0) continue;
      if (m == rows.member) {
        const char* in = static_cast<const char*>(rows.tensors[t].input);
        for (int before = 0; before < m && rows.kind != Kind::kAllGather; ++before) {
          in += rows.mine[static_cast<size_t>(before) * rows.count + t] * rows.row_bytes[t];
        }
        copy(out, in, size);
      } else if (comes_beside) {
        copy(out, beside, size);
        beside += size;
      } else if (!rows.is_sent_around(m)) {
        plan.add_recv(group.rank_of(m), {plan.spans.size(), size});
      }
      plan.spans.add(out, out, size);
    }
    if (!rows.is_sent_around(m) || plan.spans.size() == begin) continue;
    chunks_[static_cast<size_t>(group.position_of(m))] = {begin, plan.spans.size() - begin};
    rounds = true;
  }
  const Algorithm algorithm = choose_all_gather(plan.spans.size() - before);
  if (rounds || rows.most_beside > 0) execution_.record().took(algorithm);
  if (!rounds) return;
  if (algorithm == Algorithm::kBruck) {
    bruck_all_gather(group.position, rows.size, &schedule_);
  } else {
    ring_all_gather(group.position, rows.size, &schedule_);
  }
  for (ScheduleStep& step : schedule_) {  // empty blocks are not sent
    if (chunks_[static_cast<size_t>(step.send)].size == 0) step.to = step.send = -1;
    if (chunks_[static_cast<size_t>(step.recv)].size == 0) step.from = step.recv = -1;
  }
  plan.add(schedule_, group.order, chunks_);
}

Status Exchange::send(const tfring_call& call, const tfring_tensor& tensor) {
  Plan& plan = execution_.plan();
  plan.spans.add(tensor.input, const_cast<void*>(tensor.input), num_bytes(tensor));
  plan.add_send(execution_.group().rank_of(call.root), {0, plan.spans.size()});
  return execution_.execute(Until::kDone);
}

Status Exchange::receive(const tfring_call& call, tfring_allocate allocate, void* context) {
  Plan& plan = execution_.plan();
  const int rank = execution_.group().rank_of(call.root);
  const std::string who = "rank " + std::to_string(rank);
  plan.expect(rank);
  TFRING_TRY(execution_.execute(Until::kHeaderReceived));
  const CallHeader& theirs = execution_.links().to(rank)->their_header;
  tfring_tensor tensor{nullptr, nullptr, theirs.dims, theirs.num_dims, theirs.dtype};
  int64_t left = std::numeric_limits<int64_t>::max() / 32;
  for (int i = 0; i < theirs.num_dims && i < kMaxDims && left >= 0; ++i) {
    if (theirs.dims[i] < 0) left = -1;
    if (theirs.dims[i] > 0) left /= theirs.dims[i];
  }
  if (theirs.num_dims > kMaxDims || left <= 0) {
    return execution_.fail(Code::kInternal, who + " announced an invalid shape in " + execution_.here());
  }
  TFRING_TRY(execution_.waiting().look_up_at_once());
  int32_t placed = 0;
  allocate(context, tensor.dims, tensor.num_dims, &tensor.output, &placed);
  if (placed == TFRING_UNWANTED) {
    return execution_.fail(Code::kMismatch,
                           "ranks disagree: " + who + " called " + describe(theirs) + ", rank " +
                               std::to_string(execution_.settings().rank) + " called " + execution_.here() +
                               " and expects another shape",
                           Reason::kCallsDiffer, rank);
  }
  if (placed == 0) return execution_.waiting().interrupt();
  plan.spans.add(tensor.output, tensor.output, num_bytes(tensor));
  plan.add_recv(rank, {0, plan.spans.size()});
  return execution_.execute(Until::kDone);
}

}  // namespace tfring
