// Outcomes as values: nothing here throws but std::bad_alloc, and nothing is thrown across the library's
// border.
#pragma once

#include <string>
#include <utility>

namespace tfring {

// The numbers are part of the C interface (see core.h).
enum class Code : int {
  kOk = 0,
  kMismatch = 1,
  kPeerLost = 2,
  kTimeout = 3,
  kInvalid = 4,
  kInterrupted = 5,
  kInternal = 6,
};

struct Status {
  Code code = Code::kOk;
  std::string message;

  Status() = default;
  Status(Code code_in, std::string message_in) : code(code_in), message(std::move(message_in)) {}
  bool ok() const { return code == Code::kOk; }
};

#define TFRING_TRY(expression)                       \
  do {                                               \
    ::tfring::Status tfring_status_ = (expression);  \
    if (!tfring_status_.ok()) return tfring_status_; \
  } while (false)

}  // namespace tfring
