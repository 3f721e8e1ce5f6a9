// Wakes the call under way, from other threads.
#pragma once

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "fd.h"

namespace tfring {

// A descriptor that wakes the call under way, which then looks what is new. A world of one rank needs none.
class WakeEvent {
 public:
  // Returns whether there is a descriptor for it.
  bool open() {
    fd_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    return fd_.get() >= 0;
  }
  int fd() const { return fd_.get(); }

  void announce() {
    const uint64_t one = 1;
    const ssize_t written = write(fd_.get(), &one, sizeof(one));
    (void)written;
  }
  // The world is closed: the call under way gives up, and none begins.
  void announce_close() {
    is_closing_ = true;
    announce();
  }
  bool is_closing() const { return is_closing_; }

  void silence() {
    uint64_t count;
    const ssize_t got = read(fd_.get(), &count, sizeof(count));
    (void)got;
  }
  void sleep(int milliseconds) {
    pollfd fd{fd_.get(), POLLIN, 0};
    poll(&fd, 1, milliseconds);
    silence();
  }

 private:
  Fd fd_;
  std::atomic<bool> is_closing_{false};
};

}  // namespace tfring
