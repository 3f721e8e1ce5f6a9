// The reason why no bytes move.
#pragma once

#include <cstdint>
#include <string>

#include "call.h"
#include "guarded.h"
#include "liveness.h"
#include "plan.h"
#include "settings.h"
#include "status.h"

namespace tfring {

// Asks the peers of a call that stands still for their state: one is slow, or some wait for each other.
class StallInspector {
 public:
  StallInspector(const Settings& settings, const Call& call, const Plan& plan, Guarded<Liveness>* liveness);

  // To be called when bytes have moved, or no longer need to.
  void end() {
    is_warned_ = false;
    if (stands_still_) stand_still(false);
  }
  // Asks when it is time, and evaluates answers since `idle_since`. Fails if the ranks disagree, or no bytes
  // have moved for the timeout.
  Status inspect(int64_t now, int64_t idle_since, double timeout_seconds);

 private:
  Status ask(int64_t now, int64_t idle_since, double timeout_seconds);
  void stand_still(bool stands);
  bool is_pending(int rank) const;
  int awaited(bool* for_data) const;
  bool reports_stall(int slow) const;
  Status wait_crosswise(const Guarded<Liveness>::Locked& liveness, const Peer& peer, int64_t now,
                        int64_t idle_since);
  std::string here() const { return describe_in(call_.header, settings_.name); }

  const Settings& settings_;
  const Call& call_;
  const Plan& plan_;
  Guarded<Liveness>& liveness_;

  bool is_warned_ = false;  // about this standstill
  bool stands_still_ = false;
  int num_asks_ = 0;
  bool crosses_ = false;         // two ranks wait for each other in two rings
  uint64_t elsewhere_ = 0;       // the ring in which the peer waits that this rank waits for
  int64_t elsewhere_since_ = 0;  // it has waited there at least since then
  int64_t used_[2] = {0, 0};     // CPU time of this process and the peer's at that time
};

}  // namespace tfring
