// Wakes the current call from other threads.
#pragma once

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "fd.h"

namespace tfring {

// A descriptor that wakes the current call, which then checks for news. A world of one rank needs none.
class WakeEvent {
 public:
  // Returns whether a descriptor is available.
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
  // To be called when the world is closed: the current call gives up, and no other begins.
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
