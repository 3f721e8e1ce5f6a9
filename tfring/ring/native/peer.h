// The control connection to one other rank.
#pragma once

#include <cstdint>
#include <string>

#include "calls.h"
#include "core.h"
#include "fd.h"
#include "frame.h"
#include "status.h"

namespace tfring {

constexpr int kMostUnanswered = 16;  // pings; with more unsent frames, further signs of life are dropped

// The control connection to one other rank, and the state received over it.
struct Peer {
  // Takes over the control descriptor.
  Peer(const tfring_link& link, double lost_seconds);

  const int rank;
  const std::string host;
  Fd control_fd;
  bool left = false;           // it sent a closing frame
  uint64_t left_finished = 0;  // after it had finished this many calls with this rank
  bool closed = false;         // nothing more is received
  size_t fill = 0;             // bytes of `frame` read so far
  ControlFrame frame{};
  std::string unsent;       // bytes of frames to it that had no room in the connection
  uint32_t polled_for = 0;  // events that the watcher polls for
  bool is_watched = false;  // the watcher has checked it since its first sign of life
  int64_t heard = 0;        // nanoseconds, its last sign of life; 0: none yet, and the world is not open
  int64_t asked = 0;        // time of the last ping
  int unanswered = 0;
  int64_t answered = 0;  // time of the last pong, with this report
  Report report;
  uint64_t fails_from = UINT64_MAX;    // it gave up in this one of the calls with this rank
  Status failure;                      // for this reason
  uint64_t raised_after = UINT64_MAX;  // its program raised an error after this many calls with this rank,
  std::string raised;                  // that error
  uint64_t told_after = UINT64_MAX;    // this rank's program did after this many calls with it

  std::string name() const { return "rank " + std::to_string(rank) + " on " + host; }
  // Sends a frame, or keeps the bytes that have no room. A peer that reads nothing misses signs of life, but
  // not other messages.
  void send(const ControlFrame& sent_frame);
  void send_unsent();
  // Returns whether its host acknowledged all bytes that were written to it, sent or not.
  bool is_acknowledged() const;

 private:
  size_t send_now(const char* bytes, size_t size) const;
};

}  // namespace tfring
