// Waiting while no bytes move.
#pragma once

#include <poll.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "call.h"
#include "guarded.h"
#include "links.h"
#include "liveness.h"
#include "plan.h"
#include "settings.h"
#include "stall_inspector.h"
#include "status.h"
#include "wake_event.h"

namespace tfring {

constexpr int kMostYields = 100;  // if ranks outnumber the cores, so that they let each other run

// Polls for a while, then sleeps until bytes may move, and meanwhile asks why none do.
class Waiting {
 public:
  // Adds the time that it sleeps to `seconds_waited`.
  Waiting(const Settings& settings, const Call& call, const Plan& plan, const Links& links,
          Guarded<Liveness>* liveness, WakeEvent* wake_event, double* seconds_waited);

  void set_timeout(double seconds) { timeout_seconds_ = seconds; }
  void begin(bool is_large);
  // To be called when bytes have moved, or no longer need to.
  void end() {
    num_idle_ = 0;
    inspector_.end();
  }
  // To be called when no bytes have moved.
  Status wait();
  // Checks for Ctrl-C and whether the world is closed, ten times a second, whether bytes move or not.
  Status look_up(int64_t now);
  Status look_up_at_once();
  // Gives up in this call because of Ctrl-C, or because the caller provides no memory. This breaks the ring.
  Status interrupt();
  // Handles a closed data connection to that rank: waits for the reason on its control connection.
  Status peer_gone(int rank);

 private:
  Status check_step();
  void sleep(int milliseconds);
  std::string here() const { return describe_in(call_.header, settings_.name); }

  const Settings& settings_;
  const Call& call_;
  const Plan& plan_;
  const Links& links_;
  Guarded<Liveness>& liveness_;
  WakeEvent& wake_event_;
  double& seconds_waited_;
  double timeout_seconds_ = 0;

  int num_idle_ = 0;        // polls in vain since bytes last moved
  int spins_ = 0;           // number of polls before it lets others run
  int yields_ = 0;          // number of further polls before it sleeps
  int64_t idle_since_ = 0;  // nanoseconds
  int64_t looked_up_ = 0;   // time of the last check of signals and the event
  std::vector<pollfd> poll_fds_;
  StallInspector inspector_;
};

inline void Waiting::begin(bool is_large) {
  end();
  spins_ = 0;
  for (const Queue& queue : plan_.queues) {  // over TCP each poll is a system call
    const bool shared = links_.to(queue.rank)->own != nullptr;
    spins_ = std::max(spins_, shared ? settings_.num_spins : is_large ? 0 : settings_.num_spins / 10);
  }
  yields_ = settings_.num_spins > 0 ? 0 : kMostYields;
}

}  // namespace tfring
