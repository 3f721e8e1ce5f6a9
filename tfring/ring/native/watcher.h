// The thread that answers and asks the peers of this process, whatever its other threads do.
#pragma once

#include <cstdint>

#include "status.h"

namespace tfring {

// Polls the connections of an object.
struct Poll {
  int epoll_fd = -1;
  uint32_t number = 0;  // identifies the object

  // Changes the events for which the connection to a rank is polled; 0 for none. Returns false if this fails.
  bool change(int fd, int rank, uint32_t before, uint32_t events) const;
};

// An object with connections that the watcher polls; see liveness.cc.
class Watched {
 public:
  virtual ~Watched() = default;
  static constexpr int kNoHurryMilliseconds = 60000;
  // Reads the messages of a peer.
  virtual void hear(int rank, int64_t now) = 0;
  // Called after `hear` for all peers with messages: asks peers for a sign of life, evaluates their silence,
  // and sets the events to poll for. Returns the milliseconds after which to call it again. `late` is the
  // time in nanoseconds that this thread was kept from running.
  virtual int watch(int64_t now, int64_t late, const Poll& poll) = 0;
};

// Neither may be called while holding a lock that `hear` or `watch` takes. After unwatch, `watched` is no
// longer called. Fails if the thread cannot start.
Status watch_over(Watched* watched);
void unwatch(Watched* watched);
void wake_watcher();
void forget_watcher_in_child();

}  // namespace tfring
