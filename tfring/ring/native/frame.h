// Control messages between ranks, separate from the data. Little endian, with fixed sizes; the formats are
// defined only here.
//
//   data connection or mailbox, from a rank to a peer:
//       CallHeader | transfers of the plan, raw bytes       one such record for each call
//     A transfer of no bytes sends one filler byte, so that "received" always means "the peer got this far".
//
//   control connection, both ways:
//       ControlFrame ...                                    abort, closed, ping, pong, raised
#pragma once

#include <cstdint>
#include <string>

#include "core.h"
#include "kinds.h"
#include "status.h"

namespace tfring {

constexpr uint32_t kCallMagic = 0x474e4952;     // "RING"
constexpr uint32_t kControlMagic = 0x4c525443;  // "CTRL"
constexpr uint16_t kProtocolVersion = 9;
constexpr int kMaxDims = 8;  // further dimensions are hashed but not shown

struct Group;

// The call that a rank is about to make. Its peer must be about to make the same call.
struct CallHeader {
  uint32_t magic;
  uint16_t version;
  uint8_t kind;
  uint8_t op;           // for a sum of rows: its algorithm
  uint8_t dtype;        // of the first tensor
  uint8_t num_dims;     // of the first tensor
  uint8_t algorithm;    // the requested one
  uint8_t compression;  // the dtype that is sent, 0 for that of the tensors
  int32_t root;
  uint64_t group;       // identity of the group
  uint64_t sequence;    // of the collective in its group; for a send, among those to that rank
  uint64_t key_hash;    // of the full name
  uint64_t shape_hash;  // of every tensor's dtype and shape; without the first dimension if rows may differ
  int64_t num_tensors;
  int64_t num_elements;  // of all tensors; not compared if rows may differ
  int64_t dims[kMaxDims];
  char group_name[24];  // truncated; empty for all ranks
  char name[104];       // truncated
};
static_assert(sizeof(CallHeader) == 256, "the frame format is fixed");
constexpr int64_t kHeaderBytes = static_cast<int64_t>(sizeof(CallHeader));

enum class ControlType : uint8_t { kAbort = 0, kClosed = 1, kPing = 2, kPong = 3, kRaised = 4, kAwaited = 5 };

struct ControlFrame {
  uint32_t magic;
  uint16_t version;
  uint8_t type;
  uint8_t code;    // for an abort: tfring::Code
  int32_t rank;    // the sender; for an abort, the rank that it concerns, or -1
  int32_t other;   // for a cut link, the other rank
  int32_t reason;  // for an abort: tfring::Reason
  int32_t padding;
  // Counts the calls of the two ranks. abort: the first call that fails. closed: the number of calls that the
  // rank has finished. raised: the number of calls after which its program raised an error. pong: the number
  // of calls that it has begun. ping: the number of the rank's current collective among those with the rank
  // it asks; 0 for none. awaited tells a rank that all others wait for it.
  uint64_t sequence;
  char message[992];  // abort: the reason; raised: the error; pong: a Pong
};
static_assert(sizeof(ControlFrame) == 1024, "the frame format is fixed");

// The state that a rank reports when asked.
constexpr int kMostWaiting = 8;
constexpr int kMostChain = 32;
struct Pong {
  uint32_t is_running;    // 1: it is in a call of this ring
  uint32_t is_with_you;   // 1: the last begun call is one with the rank that asks
  uint32_t stands_still;  // 1: and it has made no progress for a while
  uint32_t num_chain;  // ranks that wait for each other in a row, each for a call that the next has not begun
  uint64_t call;       // number of calls it has begun, of any group
  uint64_t num_sent;   // of the calls with the rank that asks: the sends to it
  uint64_t num_received;    // and the receives from it
  int64_t cpu_nanoseconds;  // CPU time that its process has used
  CallHeader header;        // of the last begun call
  CallHeader past;          // of the collective that the asking rank is in,
  uint64_t past_number;     // and its number, 0 if this rank has not begun it
  struct {
    int32_t rank;
    uint32_t call;  // as above
  } chain[kMostChain];
  uint32_t num_waiting;       // rings of its process in which a collective of all ranks stands still
  uint32_t all_threads_wait;  // 1: these use the last of TensorFlow's threads
  struct {
    uint64_t ring;   // identity of the ring
    uint64_t begun;  // number of collectives begun there, including the one that waits
  } waiting[kMostWaiting];
};
static_assert(sizeof(Pong) <= sizeof(ControlFrame::message), "a pong fits its frame");

CallHeader make_header(const Group& group, const tfring_call& call, const tfring_tensor* tensors,
                       int num_tensors, uint64_t sequence);
// Returns whether the two agree. A receive agrees with a send of the same name and dtype, of any shape.
bool agree(const CallHeader& mine, const CallHeader& theirs);
// Returns a text such as: all_reduce "gradients/0" sum float32[1024]
std::string describe(const CallHeader& header);
// Returns a text such as: collective 17, or: collective 17 of group "rows"
std::string describe_place(const CallHeader& header);
// Returns a text such as: all_reduce "gradients/0" sum float32[1024], collective 17 of ring "world"
std::string describe_in(const CallHeader& header, const std::string& ring);

// Copies a text as far as it fits, without splitting a UTF-8 character, and ends it with a zero.
void copy_text(char* to, size_t size, const char* from);

ControlFrame make_control(ControlType type, int rank, uint64_t sequence, const std::string& message = {});
ControlFrame make_abort(uint64_t sequence, const Status& why);

}  // namespace tfring
