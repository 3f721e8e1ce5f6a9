// The sum of rows with equal ids, over all members of a group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core.h"
#include "exchange.h"
#include "execute.h"
#include "frame.h"
#include "group.h"
#include "rows.h"
#include "schedule.h"
#include "status.h"

namespace tfring {

// Implemented by exchanges.
class RowReduction {
 public:
  RowReduction(Execution* execution, Exchange* exchange) : execution_(*execution), exchange_(*exchange) {}

  Status all_reduce_rows(const tfring_call& call, const tfring_tensor* tensors, int num_tensors,
                         tfring_allocate allocate, void* context);
  int64_t scratch_bytes() const { return row_sums_.num_bytes(); }

 private:
  Status reduce_by_gathering(tfring_allocate allocate, void* context);
  Status reduce_by_owner(tfring_allocate allocate, void* context);
  Status write_rows(tfring_allocate allocate, void* context);
  Status allocate_rows(const std::vector<int64_t>& counts, tfring_allocate allocate, void* context,
                       std::vector<void*>* outputs);
  void observe(int64_t sent, int64_t summed);
  Status no_rows(size_t member);

  Execution& execution_;
  Exchange& exchange_;
  RowSums row_sums_;
};

// Returns the algorithm of a call, kGather or kOwner, from the bytes that each would have sent the last time.
Algorithm choose_way(const Group& group, const tfring_call& call, const CallHeader& header);

}  // namespace tfring
