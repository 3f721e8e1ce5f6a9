// Collectives whose sizes are learned on the way: first every rank's numbers of rows, right behind them the
// rows; between the two the caller is asked where the rows go.
#include <algorithm>
#include <limits>
#include <numeric>

#include "clock.h"
#include "tensor.h"
#include "world.h"

namespace tfring {

// Numbers of rows of each tensor that each member sends to each other.
struct World::Rows {
  Kind kind;
  int root;  // the member all is sent to or comes from, -1 for none
  int member;
  int size;
  const tfring_tensor* tensors;
  size_t count;                    // of tensors
  std::vector<int64_t> row_bytes;  // [tensor]
  std::vector<int64_t> mine;       // [member][tensor]: that go to it
  std::vector<int64_t> theirs;     // [member][tensor]: that come from it

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
  // An all_gather's large blocks are sent round, for each is wanted by all.
  bool goes_round(int from) const {
    return kind == Kind::kAllGather && (size > kFlatMembers || !is_small(theirs_bytes(from), size));
  }
};

Status World::exchange(Group* group, Kind kind, const tfring_call& call, const tfring_tensor* tensors,
                       int num_tensors, const int64_t* counts, tfring_place place, void* context) {
  return run(group, kind, call, tensors, num_tensors, [&] {
    Rows rows{kind,
              has_root(kind) ? call.root : -1,
              group->member,
              group->size(),
              tensors,
              static_cast<size_t>(num_tensors),
              {},
              {},
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
    return run_exchange(&rows, place, context);
  });
}

// Bytes to each member, or all to all, and theirs to `to`, in the order of the members.
Status World::exchange_bytes(Kind kind, const char* bytes, const std::vector<int64_t>& sizes, Memory* to,
                             std::vector<int64_t>* theirs) {
  const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  const tfring_tensor tensor{bytes, nullptr, &total, 1, static_cast<int32_t>(DType::kUint8)};
  const size_t size = static_cast<size_t>(group_->size());
  Rows rows{kind, -1, group_->member, group_->size(), &tensor, 1, {1}, sizes, std::vector<int64_t>(size)};
  if (kind == Kind::kAllGather) rows.mine.assign(size, total);
  rows.theirs[static_cast<size_t>(group_->member)] = rows.mine[static_cast<size_t>(group_->member)];
  TFRING_TRY(announce_rows(&rows));
  TFRING_TRY(check_rows(rows));
  if (!to->reserve(std::accumulate(rows.theirs.begin(), rows.theirs.end(), int64_t{0}))) return no_memory();
  void* const output = to->get();
  take_rows(rows, &output);
  *theirs = rows.theirs;
  return execute(kDone);
}

Status World::run_exchange(Rows* rows, tfring_place place, void* context) {
  const size_t mine = static_cast<size_t>(rows->member) * rows->count;
  std::copy_n(rows->mine.begin() + static_cast<int64_t>(mine), rows->count,
              rows->theirs.begin() + static_cast<int64_t>(mine));
  TFRING_TRY(announce_rows(rows));
  TFRING_TRY(check_rows(*rows));
  std::vector<void*> outputs(rows->count);
  if (rows->kind != Kind::kGather || rows->root == rows->member) {
    TFRING_TRY(ask_for_place(rows->theirs.data(), place, context, outputs.data()));
    take_rows(*rows, outputs.data());
  }
  return execute(kDone);
}

// Numbers, and behind them rows, on their way to each member; returns when the numbers of all are here.
Status World::announce_rows(Rows* rows) {
  const int64_t numbers = static_cast<int64_t>(rows->count * sizeof(int64_t));
  const bool flat = rows->kind != Kind::kAllGather || rows->size <= kFlatMembers;
  if (!flat) {
    TFRING_TRY(need_scratch(numbers * rows->size));
    copy(scratch_.get() + rows->member * numbers, rows->theirs.data() + rows->member * rows->count, numbers);
    TFRING_TRY(gather_slots(numbers));
    copy(rows->theirs.data(), scratch_.get(), numbers * rows->size);
    return {};
  }
  const int64_t to = plan_.spans.size();
  plan_.spans.add(rows->mine.data(), rows->mine.data(), numbers * rows->size);
  const int64_t from = plan_.spans.size();
  plan_.spans.add(rows->theirs.data(), rows->theirs.data(), numbers * rows->size);
  std::vector<int64_t> begins(rows->count + 1);  // of the tensors, in the spans
  for (size_t t = 0; t < rows->count; ++t) {
    const tfring_tensor& tensor = rows->tensors[t];
    int64_t total = 0;
    for (int m = 0; m < rows->size; ++m) total += rows->mine[static_cast<size_t>(m) * rows->count + t];
    if (rows->kind == Kind::kAllGather) total = tensor.dims[0];
    begins[t] = plan_.spans.size();
    plan_.spans.add(tensor.input, const_cast<void*>(tensor.input), total * rows->row_bytes[t]);
  }
  // Each begins with another, so that not all send to the same one at once.
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
    const int source = group_->ranks[static_cast<size_t>(takes_from)];
    const int rank = group_->ranks[static_cast<size_t>(sends_to)];
    if (rows->gives(takes_from, rows->member)) {
      plan_.add_recv(source, {from + takes_from * numbers, numbers});
    } else if (rows->gives(rows->member, takes_from)) {
      plan_.add_recv(source, {});  // acknowledges that it does the same
    }
    if (!rows->gives(rows->member, sends_to)) {
      if (rows->gives(sends_to, rows->member)) plan_.add_send(rank, {});
      continue;
    }
    plan_.add_send(rank, {to + sends_to * numbers, numbers});
    if (rows->goes_round(rows->member)) continue;
    for (size_t t = 0; t < rows->count; ++t) {
      const size_t at = static_cast<size_t>(sends_to) * rows->count + t;
      const int64_t size = rows->mine[at] * rows->row_bytes[t];
      if (size > 0) plan_.add_send(rank, {begins[t] + skipped[at], size});
    }
  }
  return execute(kReceived);
}

// They came from another process: what they ask for must be memory that can exist.
Status World::check_rows(const Rows& rows) const {
  for (int m = 0; m < rows.size; ++m) {
    int64_t total = 0;
    for (size_t t = 0; t < rows.count; ++t) {
      const int64_t number = rows.theirs[static_cast<size_t>(m) * rows.count + t];
      const int64_t left = std::numeric_limits<int64_t>::max() / (2 * rows.size) - total;
      if (number < 0 || number > left / std::max<int64_t>(rows.row_bytes[t], 1)) {
        return const_cast<World*>(this)->fail(
            Code::kInternal, "rank " + std::to_string(group_->ranks[static_cast<size_t>(m)]) + " announced " +
                                 std::to_string(number) + " rows in " + here());
      }
      total += number * rows.row_bytes[t];
    }
  }
  return {};
}

Status World::ask_for_place(const int64_t* numbers, tfring_place place, void* context, void** outputs) {
  looked_up_ = 0;
  TFRING_TRY(look_up(
      now_nanoseconds()));  // or Ctrl-C would be raised as `place` begins, where no caller can catch it
  int32_t placed = 0;
  place(context, numbers, outputs, &placed);
  return placed == 0 ? interruption() : Status();
}

// Computes where the rows of each member go.
void World::take_rows(const Rows& rows, void* const* outputs) {
  std::vector<int64_t> filled(rows.count, 0);          // [tensor]: bytes of the output assigned so far
  chunks_.assign(static_cast<size_t>(rows.size), {});  // [position]: its range, in bytes
  bool rounds = false;
  std::vector<Range> blocks(static_cast<size_t>(rows.size));  // [member]
  for (int m = 0; m < rows.size; ++m) {
    const int64_t begin = plan_.spans.size();
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
      } else if (!rows.goes_round(m)) {
        plan_.add_recv(group_->ranks[static_cast<size_t>(m)], {plan_.spans.size(), size});
      }
      plan_.spans.add(out, out, size);
    }
    if (!rows.goes_round(m) || plan_.spans.size() == begin) continue;
    chunks_[static_cast<size_t>(group_->position_of(m))] = {begin, plan_.spans.size() - begin};
    rounds = true;
  }
  if (!rounds) return;
  ring_all_gather(group_->position, rows.size, &schedule_);
  for (ScheduleStep& step : schedule_) {  // empty blocks are not sent
    if (chunks_[static_cast<size_t>(step.send)].size == 0) step.to = step.send = -1;
    if (chunks_[static_cast<size_t>(step.recv)].size == 0) step.from = step.recv = -1;
  }
  plan_.add(schedule_, group_->order, chunks_);
}

Status World::send(Group* group, const tfring_call& call, const tfring_tensor& tensor) {
  return run(group, Kind::kSend, call, &tensor, 1, [&] {
    plan_.spans.add(tensor.input, const_cast<void*>(tensor.input), num_bytes(tensor));
    plan_.add_send(group->ranks[static_cast<size_t>(call.root)], {0, plan_.spans.size()});
    return execute(kDone);
  });
}

Status World::receive(Group* group, const tfring_call& call, const tfring_tensor& like, tfring_shape place,
                      void* context) {
  return run(group, Kind::kReceive, call, &like, 1, [&]() -> Status {
    const int rank = group->ranks[static_cast<size_t>(call.root)];
    plan_.expect(rank);
    TFRING_TRY(execute(kGreeted));
    const CallHeader& theirs = link_to(rank)->their_header;
    tfring_tensor tensor{nullptr, nullptr, theirs.dims, theirs.num_dims, theirs.dtype};
    int64_t left = std::numeric_limits<int64_t>::max() / 32;
    for (int i = 0; i < theirs.num_dims && i < kMaxDims && left >= 0; ++i) {
      if (theirs.dims[i] < 0) left = -1;
      if (theirs.dims[i] > 0) left /= theirs.dims[i];
    }
    if (theirs.num_dims > kMaxDims || left <= 0) {
      return fail(Code::kInternal,
                  "rank " + std::to_string(rank) + " announced a shape that cannot be in " + here());
    }
    looked_up_ = 0;
    TFRING_TRY(look_up(now_nanoseconds()));
    int32_t placed = 0;
    place(context, tensor.dims, tensor.num_dims, &tensor.output, &placed);
    if (placed == TFRING_UNWANTED) {
      return fail(Code::kMismatch, "ranks disagree: rank " + std::to_string(rank) + " called " +
                                       describe(theirs) + ", rank " + std::to_string(rank_) + " called " +
                                       here() + " and wants another shape");
    }
    if (placed == 0) return interruption();
    plan_.spans.add(tensor.output, tensor.output, num_bytes(tensor));
    plan_.add_recv(rank, {0, plan_.spans.size()});
    return execute(kDone);
  });
}

}  // namespace tfring
