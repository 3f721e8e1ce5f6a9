// The thread that answers for this process and asks its peers, whatever the process's other threads do.
#pragma once

#include <cstdint>

#include "status.h"

namespace tfring {

// Polls the connections of an object.
struct Poll {
  int epoll_fd = -1;
  uint32_t number = 0;  // of the object

  // Polls the connection to a rank for other events than before; 0 for none. Returns false where that cannot
  // be.
  bool change(int fd, int rank, uint32_t before, uint32_t events) const;
};

// An object whose connections the watcher polls; see liveness.cc.
class Watched {
 public:
  virtual ~Watched() = default;
  static constexpr int kNoHurryMilliseconds = 60000;
  // Reads what a peer has said.
  virtual void hear(int rank, int64_t now) = 0;
  // After that of all that have: asks peers for a sign of life, judges their silence, and says what to poll
  // for. Returns the milliseconds after which to call again. `late`: nanoseconds this thread was kept from
  // running.
  virtual int watch(int64_t now, int64_t late, const Poll& poll) = 0;
};

// Neither may be called while holding a lock `hear` or `watch` takes. After unwatch, `watched` is called no
// more. Fails where the thread cannot start.
Status watch_over(Watched* watched);
void unwatch(Watched* watched);
void wake_watcher();
void forget_watcher_in_child();

}  // namespace tfring
