// A table of the descriptors of all rings, for fork.
#include "fd.h"

#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace tfring {
namespace {

// Never destroyed: threads may still run while the process exits.
auto& mutex = *new std::mutex;
auto& table = *new std::vector<int>;

}  // namespace

Fd::Fd(int fd) : fd_(fd) {
  if (fd_ < 0) return;
  std::lock_guard<std::mutex> lock(mutex);
  table.push_back(fd_);
}

Fd& Fd::operator=(Fd&& other) noexcept {
  if (this != &other) {
    reset();
    std::swap(fd_, other.fd_);
  }
  return *this;
}

void Fd::reset() {
  if (fd_ < 0) return;
  std::lock_guard<std::mutex> lock(mutex);
  table.erase(std::find(table.begin(), table.end(), fd_));
  close(fd_);
  fd_ = -1;
}

void hold_fds() { mutex.lock(); }
void release_fds() { mutex.unlock(); }

void close_fds_in_child() {
  for (int fd : table) close(fd);
  table.clear();
  mutex.unlock();
}

}  // namespace tfring
