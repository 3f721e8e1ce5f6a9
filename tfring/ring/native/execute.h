// The execution of a plan: moves bytes as long as any can move.
#pragma once

#include <cstdint>
#include <string>

#include "call.h"
#include "core.h"
#include "guarded.h"
#include "links.h"
#include "liveness.h"
#include "plan.h"
#include "settings.h"
#include "status.h"
#include "trace.h"
#include "wait.h"
#include "wake_event.h"

namespace tfring {

// Knows the plan of the current call and the links, but no collectives. Belongs to the thread that holds the
// call lock.
class Execution {
 public:
  Execution(const Settings& settings, Guarded<Liveness>* liveness, WakeEvent* wake_event);

  // The state of the execution. The caller sets the call and fills the plan.
  Call& call() { return call_; }
  Plan& plan() { return plan_; }
  Group& group() { return *call_.group; }
  Links& links() { return links_; }
  Record& record() { return record_; }
  tfring_statistics& statistics() { return statistics_; }
  const Settings& settings() const { return settings_; }
  Waiting& waiting() { return waiting_; }

  // Moves bytes until the plan has reached this point. The plan may then grow and be executed further.
  Status execute(Until until);
  // Handles a connection to a rank that has ended with kGone or kGarbled.
  Status cut_off(int rank, int64_t why);
  // Breaks the ring.
  Status fail(Code code, const std::string& message, Reason reason = Reason::kNone, int rank = -1);
  Status fail_without_memory();
  std::string here() const { return describe_in(call_.header, settings_.name); }

 private:
  Status send_some(Queue* queue, bool* moved);
  Status receive_some(Queue* queue, bool* moved);
  Status receive_header(Queue* queue, bool* moved);
  Status receive_bytes(const Transfer& transfer, Link* link, int64_t* got);
  void learn(int64_t start);

  const Settings& settings_;
  Guarded<Liveness>& liveness_;
  Call call_;
  Plan plan_;
  Links links_;
  Record record_;
  tfring_statistics statistics_{};
  int num_moves_ = 0;
  Waiting waiting_;
};

}  // namespace tfring
