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

constexpr int kMostUnanswered = 16;  // signs of life; more would only fill the connection

// The control connection to one other rank, and what has come over it.
struct Peer {
  // Takes over the control descriptor.
  Peer(const tfring_link& link, double lost_seconds);

  const int rank;
  const std::string host;
  Fd control_fd;
  bool left = false;           // it sent a closing frame,
  uint64_t left_finished = 0;  // having finished this many calls with this rank
  bool closed = false;         // nothing more comes
  size_t fill = 0;             // bytes of `frame` read so far
  ControlFrame frame{};
  std::string unsent;       // of frames to it: its connection had no room
  uint32_t polled_for = 0;  // by the watcher
  bool is_watched = false;  // the watcher has looked at it since it was first heard
  int64_t heard = 0;        // nanoseconds: its last sign of life; 0: none yet, and the world is not open
  int64_t asked = 0;        // the last ping
  int unanswered = 0;
  int64_t answered = 0;  // the last pong, which reported
  Report report;
  uint64_t fails_from = UINT64_MAX;    // it gave up in this one of the calls with this rank,
  Status failure;                      // for this reason
  uint64_t raised_after = UINT64_MAX;  // its program raised an error after this many calls with this rank,
  std::string raised;                  // this one
  uint64_t told_after = UINT64_MAX;    // this rank's program did, after this many with the peer

  std::string name() const { return "rank " + std::to_string(rank) + " on " + host; }
  // Sends a frame, or keeps the bytes that have no room. A peer that takes none misses signs of life, not
  // news.
  void send(const ControlFrame& sent_frame);
  void send_unsent();
  // Returns whether its host acknowledged all that was written to it, sent or not.
  bool is_acknowledged() const;

 private:
  size_t send_now(const char* bytes, size_t size) const;
};

}  // namespace tfring
