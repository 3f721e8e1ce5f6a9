// The thread that answers for this process and asks its peers, whatever the process's other threads do.
#pragma once

#include <poll.h>

#include <cstdint>
#include <vector>

#include "status.h"

namespace tfring {

// An object that the watcher polls; see liveness.cc.
class Watched {
 public:
  virtual ~Watched() = default;
  // Reads what peers have said, asks them for a sign of life, judges their silence. Adds what to poll
  // for, and returns the milliseconds after which to call again. `late`: nanoseconds this thread was kept
  // from running.
  static constexpr int kNoHurryMilliseconds = 60000;
  virtual int watch(int64_t now, int64_t late, std::vector<pollfd>* fds) = 0;
};

// Neither may be called while holding a lock `watch` takes. After unwatch, `watched` is called no more. Fails
// where the thread cannot start.
Status watch_over(Watched* watched);
void unwatch(Watched* watched);
void wake_watcher();
void forget_watcher_in_child();

}  // namespace tfring
