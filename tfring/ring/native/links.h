// Links between this rank and others, which carry data.
#pragma once

#include <memory>
#include <vector>

#include "channel.h"
#include "core.h"
#include "fd.h"
#include "frame.h"
#include "status.h"
#include "tls.h"

namespace tfring {

// Carries data between this rank and another, in both directions. Belongs to the current call. Control
// messages of the two use a separate connection (see liveness.h).
struct Link {
  // Takes over the descriptors for data.
  static Status open(const tfring_link& from, int this_rank, std::unique_ptr<Link>* link);

  int rank = -1;
  Fd data_fd;
  std::unique_ptr<Tls> tls;        // null if the data is not encrypted
  std::unique_ptr<Mailbox> own;    // the peer writes, this rank reads
  std::unique_ptr<Mailbox> peers;  // this rank writes, the peer reads
  std::unique_ptr<Sender> sender;
  std::unique_ptr<Receiver> receiver;
  CallHeader their_header{};
};

// Each pair of ranks that exchanges data has a link. A call uses the links that existed when it began; others
// may be added while it runs.
class Links {
 public:
  explicit Links(int world_size) : links_(static_cast<size_t>(world_size)) {}

  Link* to(int rank) const { return links_[static_cast<size_t>(rank)].get(); }
  void add(std::unique_ptr<Link> link) { links_[static_cast<size_t>(link->rank)] = std::move(link); }
  void close();

 private:
  std::vector<std::unique_ptr<Link>> links_;  // [rank]; null if there is none
};

}  // namespace tfring
