// A descriptor that belongs to this process only: a forked child closes its copy at once.
#pragma once

namespace tfring {

// Otherwise a surviving child would keep its parent's connections open, and peers would not notice that the
// parent died.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd);  // takes over the descriptor; -1 for none
  ~Fd() { reset(); }
  Fd(Fd&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Fd& operator=(Fd&& other) noexcept;
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;

  int get() const { return fd_; }
  void reset();

 private:
  int fd_ = -1;
};

// To be called around a fork. No descriptor is opened or closed between the first and one of the others.
void hold_fds();
void release_fds();
void close_fds_in_child();

}  // namespace tfring
