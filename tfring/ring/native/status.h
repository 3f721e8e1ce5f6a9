// Results as values: this code throws only std::bad_alloc, which no entry point of the library passes on
// (core.cc).
#pragma once

#include <string>
#include <utility>

#include "core.h"

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

// Reasons of failures. The numbers are part of the C interface and of the wire format.
enum class Reason : int {
  kNone = TFRING_NO_REASON,
  kDied = TFRING_DIED,
  kLeft = TFRING_LEFT,
  kClosed = TFRING_CLOSED,
  kInterrupted = TFRING_CTRL_C,
  kStopped = TFRING_STOPPED,
  kCutOff = TFRING_CUT_OFF,
  kRaised = TFRING_RAISED,
  kStepFailed = TFRING_STEP_FAILED,
  kCallsDiffer = TFRING_CALLS_DIFFER,
  kThreads = TFRING_THREADS,
  kSlow = TFRING_SLOW,
};
constexpr int kLastReason = TFRING_SLOW;

struct [[nodiscard]] Status {
  Code code = Code::kOk;
  std::string message;
  Reason reason = Reason::kNone;
  int rank = -1;     // the rank concerned, -1 for none
  int other = -1;    // the other rank of a cut link
  std::string call;  // the name of this rank's call

  Status() = default;
  Status(Code code_in, std::string message_in, Reason reason_in = Reason::kNone, int rank_in = -1,
         int other_in = -1)
      : code(code_in), message(std::move(message_in)), reason(reason_in), rank(rank_in), other(other_in) {}
  bool ok() const { return code == Code::kOk; }
};

#define TFRING_TRY(expression)                       \
  do {                                               \
    ::tfring::Status tfring_status_ = (expression);  \
    if (!tfring_status_.ok()) return tfring_status_; \
  } while (false)

}  // namespace tfring
