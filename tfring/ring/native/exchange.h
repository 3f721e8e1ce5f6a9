// Collectives with sizes that ranks learn on the way, and sends and receives.
#pragma once

#include <cstdint>
#include <vector>

#include "collectives.h"
#include "core.h"
#include "execute.h"
#include "kinds.h"
#include "memory.h"
#include "schedule.h"
#include "status.h"

namespace tfring {

// Extends the plan of the current call as sizes become known, and asks the caller for memory.
class Exchange {
 public:
  Exchange(Execution* execution, Collectives* collectives)
      : execution_(*execution), collectives_(*collectives) {}

  Status run(const tfring_call& call, const tfring_tensor* tensors, int num_tensors, const int64_t* counts,
             tfring_allocate allocate, void* context);
  // Sends bytes to each member, or all bytes to all, and receives theirs into `to`, in the order of members.
  Status exchange_bytes(Kind kind, const char* bytes, const std::vector<int64_t>& sizes, Memory* to,
                        std::vector<int64_t>* theirs);
  Status request_outputs(const std::vector<int64_t>& numbers, tfring_allocate allocate, void* context,
                         void** outputs);

 private:
  struct Rows;
  Status exchange(const tfring_call& call, const tfring_tensor* tensors, int num_tensors,
                  const int64_t* counts, tfring_allocate allocate, void* context);
  Status send(const tfring_call& call, const tfring_tensor& tensor);
  Status receive(const tfring_call& call, tfring_allocate allocate, void* context);
  Status announce_rows(Rows* rows);
  Status check_rows(const Rows& rows) const;
  void take_rows(const Rows& rows, void* const* outputs);

  Execution& execution_;
  Collectives& collectives_;
  Schedule schedule_;
  std::vector<Range> chunks_;
};

}  // namespace tfring
