// The sum of rows by ids: each id once, with the rows that all members have for it, added up in the order of
// the members.
//
//   gather   each member sends its local sums to all; each adds all of them up    one exchange
//   owner    an id's rows are sent to the member that owns it, which adds them    two exchanges, of fewer
//            up and sends the sums to all                                         bytes if many members
//                                                                                 have the same ids
//
// In both cases a member has one block for each owner, and sums are computed owner by owner in the order of
// the members, so the results have the same bits in the same order.
#include "reduce_rows.h"

#include <cstring>
#include <numeric>

#include "trace.h"

namespace tfring {

Status RowReduction::all_reduce_rows(const tfring_call& call, const tfring_tensor* tensors, int num_tensors,
                                     tfring_allocate allocate, void* context) {
  const int size = execution_.group().size();
  {
    const Stopwatch stopwatch(execution_.record().adding());
    row_sums_.begin(tensors, num_tensors, call.inactive != 0);
    if (size == 1) {
      row_sums_.number(row_sums_.own());
    } else if (!row_sums_.sum_own(size)) {
      return execution_.fail_without_memory();
    }
  }
  if (size == 1) return write_rows(allocate, context);
  const bool by_owner = static_cast<Algorithm>(execution_.call().header.op) == Algorithm::kOwner;
  return by_owner ? reduce_by_owner(allocate, context) : reduce_by_gathering(allocate, context);
}

Status RowReduction::reduce_by_gathering(tfring_allocate allocate, void* context) {
  const size_t size = static_cast<size_t>(execution_.group().size());
  const size_t num_tables = row_sums_.num_tables();
  std::vector<int64_t> sizes;
  const std::vector<int64_t>& blocks = row_sums_.block_sizes();
  const int64_t all = std::accumulate(blocks.begin(), blocks.end(), int64_t{0});
  TFRING_TRY(
      exchange_.exchange_bytes(Kind::kAllGather, row_sums_.blocks(), {all}, &row_sums_.received, &sizes));
  std::vector<std::vector<Entries>> shares(size, std::vector<Entries>(size * num_tables));
  const char* at = row_sums_.received.get();
  int64_t sent = 0;
  for (size_t m = 0; m < size; ++m) {
    sent += sizes[m];
    for (size_t o = 0; o < size; ++o) {
      const int64_t taken = row_sums_.take_apart(at, sizes[m], &shares[o][m * num_tables]);
      if (taken < 0) return no_rows(m);
      at += taken;
      sizes[m] -= taken;
    }
    if (sizes[m] != 0) return no_rows(m);
  }
  int64_t summed = 0;
  {
    const Stopwatch stopwatch(execution_.record().adding());
    for (size_t o = 0; o < size; ++o) {
      row_sums_.number(shares[o]);
      summed += row_sums_.block_size(&row_sums_.counts()[o * num_tables]);
    }
  }
  observe(sent, summed);
  return write_rows(allocate, context);
}

Status RowReduction::reduce_by_owner(tfring_allocate allocate, void* context) {
  const size_t size = static_cast<size_t>(execution_.group().size());
  const size_t num_tables = row_sums_.num_tables();
  std::vector<int64_t> sizes;
  TFRING_TRY(exchange_.exchange_bytes(Kind::kAllToAll, row_sums_.blocks(), row_sums_.block_sizes(),
                                      &row_sums_.received, &sizes));
  std::vector<Entries> mine(size * num_tables);
  const char* at = row_sums_.received.get();
  int64_t sent = 0;
  for (size_t m = 0; m < size; ++m) {
    if (row_sums_.take_apart(at, sizes[m], &mine[m * num_tables]) != sizes[m]) return no_rows(m);
    at += sizes[m];
    sent += sizes[m];
  }
  {
    const Stopwatch stopwatch(execution_.record().adding());
    row_sums_.number(mine);
    if (!row_sums_.write_block(0, sent)) return execution_.fail_without_memory();
  }
  const int64_t block = row_sums_.block_size(row_sums_.counts().data());
  TFRING_TRY(
      exchange_.exchange_bytes(Kind::kAllGather, row_sums_.block(), {block}, &row_sums_.received, &sizes));
  std::vector<Entries> sums(size * num_tables);
  at = row_sums_.received.get();
  sent = 0;
  int64_t summed = 0;
  for (size_t m = 0; m < size; ++m) {
    if (row_sums_.take_apart(at, sizes[m], &sums[m * num_tables]) != sizes[m]) return no_rows(m);
    int64_t told = 0;
    std::memcpy(&told, at, sizeof(told));
    sent += told;
    summed += sizes[m];
    at += sizes[m];
  }
  observe(sent, summed);
  std::vector<int64_t> counts;
  for (const Entries& entries : sums) counts.push_back(entries.count);
  std::vector<void*> outputs;
  TFRING_TRY(allocate_rows(counts, allocate, context, &outputs));
  row_sums_.put_together(sums, outputs.data());
  return {};
}

// Writes the numbered rows, share by share, to the caller's memory.
Status RowReduction::write_rows(tfring_allocate allocate, void* context) {
  std::vector<void*> outputs;
  TFRING_TRY(allocate_rows(row_sums_.counts(), allocate, context, &outputs));
  const Stopwatch stopwatch(execution_.record().adding());
  row_sums_.write_all(outputs.data());
  return {};
}

// Allocates memory for rows; `counts` is [share][table].
Status RowReduction::allocate_rows(const std::vector<int64_t>& counts, tfring_allocate allocate,
                                   void* context, std::vector<void*>* outputs) {
  outputs->assign(2 * row_sums_.num_tables(), nullptr);
  return exchange_.request_outputs(row_sums_.numbers(counts), allocate, context, outputs->data());
}

// All members learn the same numbers, so they make the same choice the next time.
void RowReduction::observe(int64_t sent, int64_t summed) {
  const CallHeader& header = execution_.call().header;
  const uint64_t key = header.key_hash ^ header.shape_hash;
  Group& group = execution_.group();
  group.seen[key % group.seen.size()] = {key, sent, summed};
}

Algorithm choose_way(const Group& group, const tfring_call& call, const CallHeader& header) {
  const uint64_t key = header.key_hash ^ header.shape_hash;
  const Observed& seen = group.seen[key % group.seen.size()];
  const bool known = seen.key == key;
  return choose_row_sums(static_cast<Algorithm>(call.op), known ? seen.sent : 0, known ? seen.summed : 0,
                         group.size());
}

Status RowReduction::no_rows(size_t member) {
  return execution_.fail(Code::kInternal, "rank " + std::to_string(execution_.group().ranks[member]) +
                                              " sent invalid rows in " + execution_.here());
}

}  // namespace tfring
