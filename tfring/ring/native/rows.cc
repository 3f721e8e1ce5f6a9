// Ids by open addressing, and sums of their rows by the kernels.
#include "rows.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels.h"
#include "tensor.h"

namespace tfring {
namespace {

constexpr int64_t kWord = sizeof(int64_t);

int64_t whole_words(int64_t size) { return (size + kWord - 1) / kWord * kWord; }

// Spreads ids of any pattern: the high bits give the position in a table, those of the lower half the owner.
uint64_t stir(int64_t id) {
  uint64_t hash = static_cast<uint64_t>(id) * 0x9e3779b97f4a7c15u;
  hash ^= hash >> 32;
  return hash * 0xd6e8feb86659fd93u;
}

bool is_16_bit_float(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBfloat16; }

template <typename T>
T load(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

}  // namespace

int owner_of(int64_t id, int size) {
  return static_cast<int>(((stir(id) & 0xffffffffu) * static_cast<uint64_t>(size)) >> 32);
}

void Distinct::begin(int64_t most) {
  int bits = 4;
  while ((int64_t{1} << bits) < 2 * most) ++bits;
  const size_t capacity = size_t{1} << bits;
  if (slots_.size() < capacity) slots_.resize(capacity);
  std::fill_n(slots_.begin(), capacity, -1);
  if (ids_.size() < static_cast<size_t>(most)) ids_.resize(static_cast<size_t>(most));
  size_ = 0;
  shift_ = 64 - bits;
}

void Distinct::number(DType type, const void* ids, int64_t count, int32_t* positions) {
  if (type == DType::kInt32) return number_as<int32_t>(ids, count, positions);
  number_as<int64_t>(ids, count, positions);
}

template <typename Id>
void Distinct::number_as(const void* ids, int64_t count, int32_t* positions) {
  const size_t last = (size_t{1} << (64 - shift_)) - 1;
  const char* from = static_cast<const char*>(ids);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t id = load<Id>(from + i * static_cast<int64_t>(sizeof(Id)));
    size_t slot = static_cast<size_t>(stir(id) >> shift_);
    while (slots_[slot] >= 0 && ids_[static_cast<size_t>(slots_[slot])] != id) slot = (slot + 1) & last;
    if (slots_[slot] < 0) {
      slots_[slot] = static_cast<int32_t>(size_);
      ids_[static_cast<size_t>(size_++)] = id;
    }
    positions[i] = slots_[slot];
  }
}

Status RowSums::check(const tfring_call& call, const tfring_tensor* tensors, int num_tensors, int num_ranks) {
  const auto invalid = [&](const std::string& problem) {
    return Status(Code::kInvalid, std::string("all_reduce_rows \"") + call.name + "\": " + problem);
  };
  const int num_tables = num_tensors / 2;
  for (int t = 0; t < num_tables; ++t) {
    const tfring_tensor& values = tensors[t];
    const tfring_tensor& ids = tensors[num_tables + t];
    const std::string of_table = " of table " + std::to_string(t);
    const DType id_type = static_cast<DType>(ids.dtype);
    if ((id_type != DType::kInt32 && id_type != DType::kInt64) || ids.num_dims != 1) {
      return invalid("the ids" + of_table + " are " + name_of(id_type) + " with " +
                     std::to_string(ids.num_dims) + " dimensions, not int32 or int64 with one");
    }
    if (values.num_dims == 0 || values.dims[0] != ids.dims[0]) {
      return invalid("the values" + of_table + " are " +
                     (values.num_dims == 0 ? "a scalar" : std::to_string(values.dims[0]) + " rows") +
                     ", with " + std::to_string(ids.dims[0]) + " ids. Each row needs one id");
    }
    if (!can_reduce(static_cast<DType>(values.dtype), Op::kSum)) {
      return invalid("bool has no sum. Cast to an integer to count");
    }
    const int64_t most = std::numeric_limits<int32_t>::max() / num_ranks;
    if (ids.dims[0] > most) {
      return invalid("there are " + std::to_string(ids.dims[0]) + " rows" + of_table +
                     ", but a rank can have at most " + std::to_string(most));
    }
  }
  return {};
}

void RowSums::begin(const tfring_tensor* tensors, int num_tensors, bool inactive) {
  const int num_tables = num_tensors / 2;
  tables_.clear();
  own_.clear();
  num_own_.clear();
  shares_.clear();
  counts_.clear();
  positions_.clear();
  begins_.clear();
  for (int t = 0; t < num_tables; ++t) {
    const tfring_tensor& values = tensors[t];
    const tfring_tensor& ids = tensors[num_tables + t];
    const DType dtype = static_cast<DType>(values.dtype);
    tables_.push_back({dtype, static_cast<DType>(ids.dtype), row_bytes(ids), row_bytes(values),
                       row_bytes(values) / size_of(dtype)});
    own_.push_back({static_cast<const char*>(ids.input), static_cast<const char*>(values.input),
                    inactive ? 0 : ids.dims[0]});
  }
}

int64_t RowSums::block_size(const int64_t* counts) const {
  int64_t size = kWord * static_cast<int64_t>(1 + tables_.size());
  for (size_t t = 0; t < tables_.size(); ++t) {
    size += whole_words(counts[t] * tables_[t].id_bytes) + whole_words(counts[t] * tables_[t].row_bytes);
  }
  return size;
}

// Computes the positions of ids and rows of each table in a block, and writes the header before them.
void RowSums::lay_out(char* block, int64_t size, const int64_t* counts, char** ids, char** rows) const {
  std::memcpy(block, &size, kWord);
  std::memcpy(block + kWord, counts, tables_.size() * kWord);
  char* to = block + kWord * static_cast<int64_t>(1 + tables_.size());
  for (size_t t = 0; t < tables_.size(); ++t) {
    for (auto [column, bytes] : {std::pair(&ids[t], counts[t] * tables_[t].id_bytes),
                                 std::pair(&rows[t], counts[t] * tables_[t].row_bytes)}) {
      *column = to;
      to += whole_words(bytes);
      std::memset(*column + bytes, 0, static_cast<size_t>(whole_words(bytes) - bytes));
    }
  }
}

int64_t RowSums::take_apart(const char* block, int64_t most, Entries* entries) const {
  int64_t at = kWord * static_cast<int64_t>(1 + tables_.size());
  if (most < at) return -1;
  for (size_t t = 0; t < tables_.size(); ++t) {
    const int64_t count = load<int64_t>(block + kWord * static_cast<int64_t>(1 + t));
    const int64_t each = tables_[t].id_bytes + tables_[t].row_bytes;
    if (count < 0 || count > (most - at) / each || count > std::numeric_limits<int32_t>::max()) return -1;
    entries[t].count = count;
    entries[t].ids = block + at;
    at += whole_words(count * tables_[t].id_bytes);
    entries[t].rows = block + at;
    at += whole_words(count * tables_[t].row_bytes);
    if (at > most) return -1;
  }
  return at;
}

bool RowSums::sum_own(int num_owners) {
  const size_t num_tables = tables_.size();
  const size_t num_blocks = static_cast<size_t>(num_owners);
  number(own_);
  std::vector<int64_t> counts(num_blocks * num_tables, 0);
  owners_.clear();
  for (size_t t = 0; t < num_tables; ++t) {
    int32_t seen = 0;
    const int32_t* positions = positions_.data() + begins_[t];
    for (int64_t i = 0; i < own_[t].count; ++i) {
      if (positions[i] != seen) continue;
      ++seen;
      const char* at = own_[t].ids + i * tables_[t].id_bytes;
      const int64_t id = tables_[t].id_type == DType::kInt32 ? load<int32_t>(at) : load<int64_t>(at);
      owners_.push_back(owner_of(id, num_owners));
      ++counts[static_cast<size_t>(owners_.back()) * num_tables + t];
    }
  }
  block_sizes_.clear();
  int64_t total = 0;
  for (size_t o = 0; o < num_blocks; ++o) {
    block_sizes_.push_back(block_size(&counts[o * num_tables]));
    total += block_sizes_.back();
  }
  if (!blocks_.reserve(total)) return false;
  std::vector<char*> ids(num_blocks * num_tables);
  std::vector<char*> rows(num_blocks * num_tables);
  char* block = blocks_.get();
  for (size_t o = 0; o < num_blocks; ++o) {
    lay_out(block, 0, &counts[o * num_tables], &ids[o * num_tables], &rows[o * num_tables]);
    block += block_sizes_[o];
  }
  size_t begin = 0;
  for (size_t t = 0; t < num_tables; ++t) {
    id_places_.clear();
    row_places_.clear();
    for (int64_t u = 0; u < num_own_[t]; ++u) {
      const size_t at = static_cast<size_t>(owners_[begin++]) * num_tables + t;
      id_places_.push_back(ids[at]);
      row_places_.push_back(rows[at]);
      ids[at] += tables_[t].id_bytes;
      rows[at] += tables_[t].row_bytes;
    }
    add_up(tables_[t], &own_[t], 1, positions_.data() + begins_[t]);
  }
  shares_.clear();
  counts_.clear();
  positions_.clear();
  begins_.clear();
  return true;
}

void RowSums::number(const std::vector<Entries>& sources) {
  const size_t num_sources = sources.size() / std::max<size_t>(tables_.size(), 1);
  shares_.push_back(sources);
  const bool first = num_own_.empty();  // of this rank's own rows
  for (size_t t = 0; t < tables_.size(); ++t) {
    int64_t total = 0;
    for (size_t s = 0; s < num_sources; ++s) total += sources[s * tables_.size() + t].count;
    distinct_.begin(total);
    size_t at = positions_.size();
    begins_.push_back(at);
    positions_.resize(at + static_cast<size_t>(total));
    for (size_t s = 0; s < num_sources; ++s) {
      const Entries& entries = sources[s * tables_.size() + t];
      distinct_.number(tables_[t].id_type, entries.ids, entries.count, positions_.data() + at);
      at += static_cast<size_t>(entries.count);
    }
    counts_.push_back(distinct_.size());
    if (first) num_own_.push_back(distinct_.size());
  }
}

std::vector<int64_t> RowSums::numbers(const std::vector<int64_t>& counts) const {
  std::vector<int64_t> both;
  for (size_t at = 0; at < counts.size(); at += num_tables()) {
    for (int twice = 0; twice < 2; ++twice) both.insert(both.end(), &counts[at], &counts[at] + num_tables());
  }
  for (int twice = 0; twice < 2; ++twice) both.insert(both.end(), num_own_.begin(), num_own_.end());
  return both;
}

void RowSums::write_all(void* const* outputs) {
  std::vector<char*> to;
  for (size_t i = 0; i < 2 * num_tables(); ++i) to.push_back(static_cast<char*>(outputs[i]));
  for (size_t share = 0; share < shares_.size(); ++share) {
    write(share, &to[num_tables()], to.data());
    for (size_t t = 0; t < num_tables(); ++t) {
      const int64_t count = counts_[share * num_tables() + t];
      to[t] += count * tables_[t].row_bytes;
      to[num_tables() + t] += count * tables_[t].id_bytes;
    }
  }
}

void RowSums::put_together(const std::vector<Entries>& sums, void* const* outputs) const {
  for (size_t t = 0; t < num_tables(); ++t) {
    char* rows = static_cast<char*>(outputs[t]);
    char* ids = static_cast<char*>(outputs[num_tables() + t]);
    for (size_t i = t; i < sums.size(); i += num_tables()) {
      copy(rows, sums[i].rows, sums[i].count * tables_[t].row_bytes);
      copy(ids, sums[i].ids, sums[i].count * tables_[t].id_bytes);
      rows += sums[i].count * tables_[t].row_bytes;
      ids += sums[i].count * tables_[t].id_bytes;
    }
  }
}

void RowSums::write(size_t share, char* const* ids, char* const* rows) {
  const std::vector<Entries>& sources = shares_[share];
  std::vector<Entries> of_table;
  for (size_t t = 0; t < tables_.size(); ++t) {
    const size_t at = share * tables_.size() + t;
    id_places_.clear();
    row_places_.clear();
    for (int64_t u = 0; u < counts_[at]; ++u) {
      id_places_.push_back(ids[t] + u * tables_[t].id_bytes);
      row_places_.push_back(rows[t] + u * tables_[t].row_bytes);
    }
    of_table.clear();
    for (size_t s = t; s < sources.size(); s += tables_.size()) of_table.push_back(sources[s]);
    add_up(tables_[t], of_table.data(), of_table.size(), positions_.data() + begins_[at]);
  }
}

bool RowSums::write_block(size_t share, int64_t size) {
  const int64_t* counts = &counts_[share * tables_.size()];
  if (!block_.reserve(block_size(counts))) return false;
  std::vector<char*> ids(tables_.size());
  std::vector<char*> rows(tables_.size());
  lay_out(block_.get(), size, counts, ids.data(), rows.data());
  write(share, ids.data(), rows.data());
  return true;
}

// Writes each id to its place, and adds up its rows there, one after the other.
void RowSums::add_up(const Table& table, const Entries* sources, size_t num_sources,
                     const int32_t* positions) {
  const size_t width = static_cast<size_t>(table.width);
  const bool wide = is_16_bit_float(table.dtype);
  std::vector<void*> narrow_places;
  if (wide) {
    narrow_places.swap(row_places_);
    if (wide_.size() < narrow_places.size() * width) wide_.resize(narrow_places.size() * width);
    for (size_t u = 0; u < narrow_places.size(); ++u) row_places_.push_back(&wide_[u * width]);
  }
  int64_t begun = 0;
  for (size_t s = 0; s < num_sources; ++s) {
    const Entries& from = sources[s];
    int32_t seen = static_cast<int32_t>(begun);
    for (int64_t i = 0; i < from.count; ++i) {
      if (positions[i] != seen) continue;
      std::memcpy(id_places_[static_cast<size_t>(seen++)], from.ids + i * table.id_bytes,
                  static_cast<size_t>(table.id_bytes));
    }
    add_rows(table.dtype, row_places_.data(), positions, from.rows, from.count, table.width, &begun);
    positions += from.count;
  }
  for (size_t u = 0; u < narrow_places.size(); ++u) {
    narrow(table.dtype, narrow_places[u], &wide_[u * width], table.width);
  }
}

Status sum_rows(const tfring_call& call, const tfring_tensor* tensors, int num_tensors,
                tfring_allocate allocate, void* context) {
  for (int t = 0; t < num_tensors; ++t) {
    if (size_of(static_cast<DType>(tensors[t].dtype)) == 0) {
      return {Code::kInvalid, "the ring does not support dtype number " + std::to_string(tensors[t].dtype)};
    }
  }
  TFRING_TRY(RowSums::check(call, tensors, num_tensors, 1));
  RowSums sums;
  sums.begin(tensors, num_tensors, call.inactive != 0);
  sums.number(sums.own());
  std::vector<void*> outputs(static_cast<size_t>(num_tensors));
  int32_t placed = 0;
  const std::vector<int64_t> numbers = sums.numbers(sums.counts());
  allocate(context, numbers.data(), static_cast<int32_t>(numbers.size()), outputs.data(), &placed);
  if (placed == 0) return {Code::kInterrupted, "interrupted"};
  sums.write_all(outputs.data());
  return {};
}

}  // namespace tfring
