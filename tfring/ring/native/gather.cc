// all_gather, whose sizes are learned on the way: the first half brings every rank's numbers of rows, the
// second its rows.
#include <algorithm>
#include <limits>

#include "clock.h"
#include "ring.h"
#include "tensor.h"

namespace tfring {

// What is learned between the halves.
struct Ring::Gather {
  const tfring_tensor* tensors;
  size_t count;                    // of tensors
  std::vector<int64_t> row_bytes;  // [tensor]
  std::vector<int64_t> rows;       // [rank][tensor]
  std::vector<int64_t> bytes;      // [rank]

  int64_t bytes_of(int rank, size_t tensor) const {
    return rows[static_cast<size_t>(rank) * count + tensor] * row_bytes[tensor];
  }
};

Status Ring::run_all_gather(const tfring_tensor* tensors, int num_tensors, tfring_place place,
                            void* context) {
  Gather gather{tensors, static_cast<size_t>(num_tensors), {}, {}, {}};
  gather.rows.assign(static_cast<size_t>(world_size_) * gather.count, 0);
  gather.bytes.assign(static_cast<size_t>(world_size_), 0);
  for (size_t t = 0; t < gather.count; ++t) {
    gather.row_bytes.push_back(row_bytes(tensors[t]));
    gather.rows[static_cast<size_t>(rank_) * gather.count + t] = tensors[t].dims[0];
  }
  TFRING_TRY(gather_rows(&gather));
  looked_up_ = 0;
  TFRING_TRY(
      look_up(now_nanoseconds()));  // or Ctrl-C would be raised as `place` begins, where nobody can catch it
  std::vector<void*> outputs(gather.count);
  int32_t placed = 0;
  place(context, gather.rows.data(), outputs.data(), &placed);
  if (placed == 0) return interruption();
  plan_.clear();
  return place_rows(gather, outputs.data());
}

// The first half: every rank's numbers of rows go round, and with them its rows where they are few. Each step
// of the schedule becomes two: the numbers, whose size is known, then the rows, whose size the numbers tell.
//
//     spans:  numbers of rank 0 | numbers of rank 1 | ... | slot of rank 0 | slot of rank 1 | ...
Status Ring::gather_rows(Gather* gather) {
  const int64_t numbers = static_cast<int64_t>(gather->count * sizeof(int64_t));
  const int64_t slot = kSmallBytes / world_size_;
  TFRING_TRY(need_scratch(slot * world_size_));
  plan_.spans.add(gather->rows.data(), gather->rows.data(), numbers * world_size_);
  plan_.spans.add(scratch_.get(), scratch_.get(), slot * world_size_);
  plan_.lag = 2;
  for (int s = 0; s < num_all_gather_steps(world_size_); ++s) {
    const ScheduleStep step = all_gather_step(rank_, world_size_, s);
    plan_.steps.push_back(
        {{step.send * numbers, numbers}, {step.recv * numbers, numbers}, true, true, false, false});
    plan_.steps.push_back({{}, {}, false, false, false, false});
  }
  TFRING_TRY(learn_block(gather, rank_));
  if (is_small(gather->bytes[static_cast<size_t>(rank_)], world_size_)) {
    char* to = scratch_.get() + rank_ * slot;
    for (size_t t = 0; t < gather->count; ++t) {
      copy(to, gather->tensors[t].input, num_bytes(gather->tensors[t]));
      to += num_bytes(gather->tensors[t]);
    }
  }
  plan_.received = [this, gather](size_t step) {
    if (step % 2 != 0) return Status();
    return learn_block(gather, all_gather_step(rank_, world_size_, static_cast<int>(step / 2)).recv);
  };
  return execute(kWithHeader);
}

// Knowing how many rows a rank has, settles the steps in which they come and go.
Status Ring::learn_block(Gather* gather, int rank) {
  int64_t size = 0;
  for (size_t t = 0; t < gather->count; ++t) {
    // They came from another process: what they ask for must be memory that can exist.
    const int64_t rows = gather->rows[static_cast<size_t>(rank) * gather->count + t];
    const int64_t left = std::numeric_limits<int64_t>::max() / (2 * world_size_) - size;
    if (rows < 0 || rows > left / std::max<int64_t>(gather->row_bytes[t], 1)) {
      return fail(Code::kInternal, "rank " + std::to_string(rank) + " announced " + std::to_string(rows) +
                                       " rows in " + here());
    }
    size += gather->bytes_of(rank, t);
  }
  gather->bytes[static_cast<size_t>(rank)] = size;
  if (size == 0 || !is_small(size, world_size_)) return {};
  const int64_t numbers = static_cast<int64_t>(gather->count * sizeof(int64_t));
  const Range block{numbers * world_size_ + rank * (kSmallBytes / world_size_), size};
  const size_t sending =
      static_cast<size_t>(wrap(rank_ - rank, world_size_));  // all_gather_step sends it then,
  const size_t num_steps = static_cast<size_t>(num_all_gather_steps(world_size_));
  if (sending < num_steps) {
    plan_.steps[2 * sending + 1].send = block;
    plan_.steps[2 * sending + 1].sends = true;
  }
  if (sending > 0) {  // and receives it the step before
    plan_.steps[2 * sending - 1].recv = block;
    plan_.steps[2 * sending - 1].receives = true;
  }
  return {};
}

// The second half: what came with the numbers is put in its place; blocks too large for that go round now.
Status Ring::place_rows(const Gather& gather, void* const* outputs) {
  std::vector<Range> blocks;                     // [rank]: positions in the plan; empty if small
  std::vector<int64_t> filled(gather.count, 0);  // [tensor]: bytes of the output in place
  for (int r = 0; r < world_size_; ++r) {
    const bool small = is_small(gather.bytes[static_cast<size_t>(r)], world_size_);
    const char* slot = scratch_.get() + r * (kSmallBytes / world_size_);
    const int64_t begin = plan_.spans.size();
    for (size_t t = 0; t < gather.count; ++t) {
      const int64_t size = gather.bytes_of(r, t);
      char* out = static_cast<char*>(outputs[t]) + filled[t];
      filled[t] += size;
      if (r == rank_) {
        copy(out, gather.tensors[t].input, size);
      } else if (small) {
        copy(out, slot, size);
        slot += size;
      }
      plan_.spans.add(out, out, size);
    }
    blocks.push_back({begin, small ? 0 : plan_.spans.size() - begin});
  }
  for (int s = 0; s < num_all_gather_steps(world_size_); ++s) {
    const ScheduleStep step = all_gather_step(rank_, world_size_, s);
    const Range send = blocks[static_cast<size_t>(step.send)];
    const Range recv = blocks[static_cast<size_t>(step.recv)];
    plan_.steps.push_back({send, recv, send.size > 0, recv.size > 0, false, false});
  }
  return execute(kWithoutHeader);
}

}  // namespace tfring
