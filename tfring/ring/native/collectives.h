// Collectives with sizes that all ranks know before they begin.
#pragma once

#include <cstdint>
#include <vector>

#include "core.h"
#include "execute.h"
#include "memory.h"
#include "plan.h"
#include "schedule.h"
#include "status.h"

namespace tfring {

// Turns the collective of the current call into a plan of sends and receives, and has the plan executed.
class Collectives {
 public:
  explicit Collectives(Execution* execution) : execution_(*execution) {}

  Status run(const tfring_call& call, const tfring_tensor* tensors, int num_tensors);

  // Grows the scratch, before the first byte is sent.
  Status need_scratch(int64_t size);
  char* scratch() const { return scratch_.get(); }
  int64_t scratch_bytes() const { return scratch_.size(); }
  Status gather_slots(int64_t slot);

 private:
  Status all_reduce(const tfring_call& call, const tfring_tensor* tensors, int num_tensors);
  Status reduce(const tfring_call& call, const tfring_tensor* tensors, int num_tensors);
  Status reduce_scatter(const tfring_call& call, const tfring_tensor* tensors, int num_tensors);
  Status broadcast(const tfring_call& call, const tfring_tensor* tensors, int num_tensors);
  void add_slots_up(int64_t slot);
  Status small_all_reduce(const tfring_call& call, const tfring_tensor* tensors, int num_tensors);
  Status large_all_reduce(Algorithm algorithm, const tfring_call& call, const tfring_tensor* tensors,
                          int num_tensors);
  Status compressed_all_reduce(const tfring_call& call, const tfring_tensor* tensors, int num_tensors);

  Execution& execution_;
  Schedule schedule_;
  std::vector<Range> chunks_;
  std::vector<const void*> slots_;
  Memory scratch_;
};

}  // namespace tfring
