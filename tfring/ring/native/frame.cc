// Fills, compares and describes frames.
#include "frame.h"

#include <algorithm>
#include <cstring>

#include "dtype.h"
#include "world.h"

namespace tfring {
namespace {

constexpr uint64_t kHashStart = 14695981039346656037u;

// FNV-1a over 64-bit words, mixed so that short inputs spread.
uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 1099511628211u;
  return hash ^ (hash >> 29);
}

uint64_t hash_text(const char* text) {
  uint64_t hash = kHashStart;
  for (; *text != '\0'; ++text) hash = mix(hash, static_cast<unsigned char>(*text));
  return hash;
}

}  // namespace

void copy_text(char* to, size_t size, const char* from) {
  size_t length = std::min(std::strlen(from), size - 1);
  if (from[length] != '\0') {
    while (length > 0 && (static_cast<unsigned char>(from[length]) & 0xc0) == 0x80) --length;
  }
  std::memcpy(to, from, length);
  std::memset(to + length, 0, size - length);
}

CallHeader make_header(const Group& group, const tfring_call& call, const tfring_tensor* tensors,
                       int num_tensors, uint64_t sequence) {
  const Kind kind = static_cast<Kind>(call.kind);
  CallHeader header{};
  header.magic = kCallMagic;
  header.version = kProtocolVersion;
  header.kind = static_cast<uint8_t>(kind);
  header.op = reduces(kind) ? static_cast<uint8_t>(call.op) : 0;
  header.compression = static_cast<uint8_t>(call.compression);
  // For a send or receive, the receiver, so that both ranks have the same value.
  header.root = kind == Kind::kReceive ? group.member : has_root(kind) ? call.root : -1;
  header.group = group.identity;
  header.sequence = sequence;
  header.key_hash = hash_text(call.name);
  if (call.of != 0) header.key_hash = mix(header.key_hash, static_cast<uint64_t>(call.of));
  header.num_tensors = num_tensors;
  copy_text(header.name, sizeof(header.name), call.name);
  if (call.of != 0) {
    const std::string name = std::string(call.name) + " of collective " + std::to_string(call.of);
    copy_text(header.name, sizeof(header.name), name.c_str());
  }
  copy_text(header.group_name, sizeof(header.group_name), group.is_world ? "" : group.name.c_str());
  if (num_tensors > 0) {
    header.dtype = static_cast<uint8_t>(tensors[0].dtype);
    header.num_dims = static_cast<uint8_t>(std::min(tensors[0].num_dims, kMaxDims));
    for (int i = 0; i < header.num_dims; ++i) header.dims[i] = tensors[0].dims[i];
  }
  header.shape_hash = kHashStart;
  for (int t = 0; t < num_tensors; ++t) {
    header.shape_hash = mix(header.shape_hash, static_cast<uint64_t>(tensors[t].dtype));
    if (is_pairwise(kind)) continue;
    header.shape_hash = mix(header.shape_hash, static_cast<uint64_t>(tensors[t].num_dims));
    int64_t elements = 1;
    for (int i = 0; i < tensors[t].num_dims; ++i) {
      elements *= tensors[t].dims[i];
      if (learns_rows(kind) && i == 0) continue;
      header.shape_hash = mix(header.shape_hash, static_cast<uint64_t>(tensors[t].dims[i]));
    }
    header.num_elements += elements;
  }
  return header;
}

bool agree(const CallHeader& mine, const CallHeader& theirs) {
  const Kind kind = static_cast<Kind>(mine.kind);
  const Kind wanted = kind == Kind::kSend ? Kind::kReceive : kind == Kind::kReceive ? Kind::kSend : kind;
  return mine.magic == theirs.magic && mine.version == theirs.version &&
         theirs.kind == static_cast<uint8_t>(wanted) && mine.op == theirs.op && mine.root == theirs.root &&
         mine.group == theirs.group && mine.sequence == theirs.sequence && mine.key_hash == theirs.key_hash &&
         mine.shape_hash == theirs.shape_hash && mine.num_tensors == theirs.num_tensors &&
         mine.algorithm == theirs.algorithm && mine.compression == theirs.compression &&
         (learns_rows(kind) || is_pairwise(kind) || mine.num_elements == theirs.num_elements);
}

std::string describe(const CallHeader& header) {
  const Kind kind = static_cast<Kind>(header.kind);
  const std::string name(header.name,
                         strnlen(header.name, sizeof(header.name)));  // from a peer, possibly not terminated
  std::string text = std::string(name_of(kind)) + " \"" + name + "\"";
  if (kind == Kind::kBarrier) return text;
  if (reduces(kind)) text += std::string(" ") + name_of(static_cast<Op>(header.op));
  if (kind == Kind::kAllReduceRows) {
    text += static_cast<Algorithm>(header.op) == Algorithm::kOwner ? " by owner" : " by gathering";
  }
  if (header.compression != 0) {
    text += std::string(" compressed to ") + name_of(static_cast<DType>(header.compression));
  }
  if (has_root(kind)) {
    const bool towards = kind == Kind::kReduce || kind == Kind::kGather || is_pairwise(kind);
    text += (towards ? " to rank " : " from rank ") + std::to_string(header.root);
  }
  if (header.num_tensors > 1) text += " of " + std::to_string(header.num_tensors) + " tensors, the first";
  text += std::string(" ") + name_of(static_cast<DType>(header.dtype));
  if (kind == Kind::kReceive) return text;  // of any shape
  text += "[";
  for (int i = 0; i < std::min<int>(header.num_dims, kMaxDims); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(header.dims[i]);
  }
  text += "]";
  if (header.num_tensors > 1) text += ", " + std::to_string(header.num_elements) + " elements in all";
  return text;
}

std::string describe_place(const CallHeader& header) {
  const std::string group(header.group_name, strnlen(header.group_name, sizeof(header.group_name)));
  const char* what = static_cast<Kind>(header.kind) == Kind::kSend      ? "send "
                     : static_cast<Kind>(header.kind) == Kind::kReceive ? "receive "
                                                                        : "collective ";
  return what + std::to_string(header.sequence) + (group.empty() ? "" : " of group \"" + group + "\"");
}

std::string describe_in(const CallHeader& header, const std::string& ring) {
  return describe(header) + ", " + describe_place(header) + " of ring \"" + ring + "\"";
}

ControlFrame make_control(ControlType type, int rank, uint64_t sequence, const std::string& message) {
  ControlFrame frame{};
  frame.magic = kControlMagic;
  frame.version = kProtocolVersion;
  frame.type = static_cast<uint8_t>(type);
  frame.rank = rank;
  frame.sequence = sequence;
  copy_text(frame.message, sizeof(frame.message), message.c_str());
  return frame;
}

ControlFrame make_abort(uint64_t sequence, const Status& why) {
  ControlFrame frame = make_control(ControlType::kAbort, why.rank, sequence, why.message);
  frame.code = static_cast<uint8_t>(why.code);
  frame.reason = static_cast<int32_t>(why.reason);
  frame.other = why.other;
  return frame;
}

}  // namespace tfring
