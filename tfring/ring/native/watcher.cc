// One thread with one epoll over the control connections of all rings, which handles those with events.
#include "watcher.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "border.h"
#include "clock.h"
#include "fd.h"

namespace tfring {
namespace {

constexpr int kPauseMilliseconds = 100;  // before it tries again, if it had no memory
constexpr int kMostEvents = 64;          // returned by one poll
constexpr int kMostLooks = 64;

class Watcher {
 public:
  Status add(Watched* watched) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const int error = running_ ? 0 : start();
      if (error != 0) {
        return {Code::kInternal,
                std::string("the thread that watches over the ring cannot start: ") + std::strerror(error)};
      }
      watched_.emplace_back(++last_number_, watched);
    }
    wake();
    return {};
  }

  void remove(Watched* watched) {
    std::lock_guard<std::mutex> lock(mutex_);
    watched_.erase(std::remove_if(watched_.begin(), watched_.end(),
                                  [&](const auto& one) { return one.second == watched; }),
                   watched_.end());
  }

  void wake() {
    const uint64_t one = 1;
    const ssize_t written = write(wake_fd_.get(), &one, sizeof(one));
    (void)written;
  }

 private:
  int start() {
    const int wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_fd < 0) return errno;
    wake_fd_ = Fd(wake_fd);
    const int epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (epoll_fd < 0) return errno;
    epoll_fd_ = Fd(epoll_fd);
    if (!Poll{epoll_fd, 0}.change(wake_fd, 0, 0, EPOLLIN)) return errno;
    // Signals are for the program's threads, and Ctrl-C for Python's main thread.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    const int error = pthread_create(&thread, &attributes, &Watcher::run_thread, this);
    running_ = error == 0;
    if (running_) pthread_setname_np(thread, "tfring-watcher");
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return error;
  }

  static void* run_thread(void* self) {
    static_cast<Watcher*>(self)->run();
    return nullptr;
  }

  [[noreturn]] void run() {
    epoll_event events[kMostEvents];
    int64_t expected = now_nanoseconds();
    int milliseconds = 0;
    while (true) {
      int count = epoll_wait(epoll_fd_.get(), events, kMostEvents, milliseconds);
      const int64_t now = now_nanoseconds();
      milliseconds = Watched::kNoHurryMilliseconds;
      guard(
          [&] {
            std::lock_guard<std::mutex> lock(mutex_);
            // Reads all messages before silence is evaluated. Connections that are closed or writable are
            // returned again by each poll until `watch` has handled them.
            for (int looks = 0; count > 0 && looks < kMostLooks; ++looks) {
              for (int i = 0; i < count; ++i) hear(events[i].data.u64, now);
              count = count < kMostEvents ? 0 : epoll_wait(epoll_fd_.get(), events, kMostEvents, 0);
            }
            for (const auto& [number, watched] : watched_) {
              const Poll poll{epoll_fd_.get(), number};
              milliseconds =
                  std::min(milliseconds, watched->watch(now, std::max<int64_t>(now - expected, 0), poll));
            }
          },
          [&](const char*) { milliseconds = kPauseMilliseconds; });
      expected = now + milliseconds * int64_t{1000000};
    }
  }

  // Ignores an object that is no longer watched.
  void hear(uint64_t data, int64_t now) {
    const uint32_t number = static_cast<uint32_t>(data >> 32);
    if (number == 0) {
      uint64_t count;
      const ssize_t got = read(wake_fd_.get(), &count, sizeof(count));
      (void)got;
    }
    for (const auto& one : watched_) {
      if (one.first == number) one.second->hear(static_cast<int>(data & UINT32_MAX), now);
    }
  }

  std::mutex mutex_;
  std::vector<std::pair<uint32_t, Watched*>> watched_;  // by numbers, from 1
  uint32_t last_number_ = 0;
  bool running_ = false;
  Fd wake_fd_;
  Fd epoll_fd_;
};

// Never destroyed: the thread outlives main.
Watcher* watcher = new Watcher;

}  // namespace

bool Poll::change(int fd, int rank, uint32_t before, uint32_t events) const {
  epoll_event event{};
  event.events = events;
  event.data.u64 = uint64_t{number} << 32 | static_cast<uint32_t>(rank);
  const int how = before == 0 ? EPOLL_CTL_ADD : events == 0 ? EPOLL_CTL_DEL : EPOLL_CTL_MOD;
  return before == events || epoll_ctl(epoll_fd, how, fd, &event) == 0;
}

Status watch_over(Watched* watched) { return watcher->add(watched); }
void unwatch(Watched* watched) { watcher->remove(watched); }
void wake_watcher() { watcher->wake(); }
void forget_watcher_in_child() { watcher = new Watcher; }

}  // namespace tfring
