// One thread, one poll over the control connections of all rings.
#include "watcher.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>

#include "border.h"
#include "clock.h"
#include "fd.h"

namespace tfring {
namespace {

constexpr int kPauseMilliseconds = 100;  // before it looks again, where it had no memory

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
      watched_.push_back(watched);
    }
    wake();
    return {};
  }

  void remove(Watched* watched) {
    std::lock_guard<std::mutex> lock(mutex_);
    watched_.erase(std::remove(watched_.begin(), watched_.end(), watched), watched_.end());
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
    // Signals are for the program's threads, and Ctrl-C for Python's first.
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
    std::vector<pollfd> fds;
    int64_t expected = now_nanoseconds();
    while (true) {
      const int64_t now = now_nanoseconds();
      int milliseconds = Watched::kNoHurryMilliseconds;
      fds.assign(1, {wake_fd_.get(), POLLIN, 0});
      guard(
          [&] {
            std::lock_guard<std::mutex> lock(mutex_);
            for (Watched* watched : watched_) {
              milliseconds =
                  std::min(milliseconds, watched->watch(now, std::max<int64_t>(now - expected, 0), &fds));
            }
          },
          [&](const char*) { milliseconds = kPauseMilliseconds; });
      expected = now + milliseconds * int64_t{1000000};
      poll(fds.data(), fds.size(), milliseconds);
      uint64_t count;
      const ssize_t got = read(wake_fd_.get(), &count, sizeof(count));
      (void)got;
    }
  }

  std::mutex mutex_;
  std::vector<Watched*> watched_;
  bool running_ = false;
  Fd wake_fd_;
};

// Never destroyed: the thread outlives main.
Watcher* watcher = new Watcher;

}  // namespace

Status watch_over(Watched* watched) { return watcher->add(watched); }
void unwatch(Watched* watched) { watcher->remove(watched); }
void wake_watcher() { watcher->wake(); }
void forget_watcher_in_child() { watcher = new Watcher; }

}  // namespace tfring
