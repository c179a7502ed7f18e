#include "server/store/gram_pieces.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "quantd/v1/statistics.pb.h"

namespace quantd::server {
namespace {

constexpr absl::string_view kCannotAddGram = "cannot contribute a Gram matrix";

// Not of the bytes, so that it is short.
constexpr char kSelectGramChecksums[] =
    "SELECT checksum FROM statistics_pieces WHERE set_id = $1 AND tensor = $2 "
    "AND source = $3 AND sequence = $4 AND piece > $5 AND piece <= $6 "
    "ORDER BY piece";

absl::Status Mismatch(absl::string_view what) {
  return core::StatisticsMismatchError(what);
}

absl::string_view AsBytes(const uint64_t& checksum) {
  return {reinterpret_cast<const char*>(&checksum), sizeof(checksum)};
}

// `checksum`  over the pieces behind it.
std::string HeadBytes(const core::GramState::Parts& head, uint64_t checksum) {
  v1::GramState message;
  message.mutable_step_exponent()->Assign(head.exponents.begin(),
                                          head.exponents.end());
  message.set_part_size(static_cast<uint64_t>(head.part_size));
  message.set_rows(static_cast<uint64_t>(head.rows));
  message.set_left_out_rows(static_cast<uint64_t>(head.left_out_rows));
  message.set_clipped_count(static_cast<uint64_t>(head.clipped));
  return absl::StrCat(AsBytes(checksum), message.SerializeAsString());
}

// Reads the next piece, and answers its checksum; none where there is none.
absl::StatusOr<absl::optional<uint64_t>> ReadNext(SqlConnection* connection,
                                                  const SourceVersion& version,
                                                  int64_t piece,
                                                  GramAssembler* assembler,
                                                  std::vector<int64_t>* sums) {
  const std::unique_ptr<SqlStatement> row =
      SelectPiece(connection, version, piece);
  absl::StatusOr<bool> found = row->Step(kCannotAddGram);
  if (!found.ok()) return found.status();
  if (!*found) return absl::optional<uint64_t>();
  const auto checksum = static_cast<uint64_t>(row->Int(0));
  absl::StatusOr<absl::Span<const int64_t>> read =
      assembler->Add(piece, checksum, row->Bytes(1));
  if (!read.ok()) return read.status();
  sums->assign(read->begin(), read->end());
  return absl::optional<uint64_t>(checksum);
}

}  // namespace

absl::Status CheckGramHeads(const core::GramState::Parts& whole,
                            const core::GramState::Parts& part) {
  if (whole.exponents.size() != part.exponents.size()) {
    return Mismatch(absl::StrCat("a Gram matrix of ", part.exponents.size(),
                                 " features, expected ",
                                 whole.exponents.size()));
  }
  if (whole.part_size != part.part_size) {
    return Mismatch(absl::StrCat("a Gram matrix in parts of ", part.part_size,
                                 " features, expected ", whole.part_size));
  }
  if (whole.exponents != part.exponents) {
    return Mismatch(
        "the steps of the Gram matrix are not those of other contributions; "
        "send it again, which takes theirs");
  }
  if (part.rows > core::GramState::kMaxRows - whole.rows) {
    return Mismatch(absl::StrCat("a Gram matrix of ", whole.rows, " and ",
                                 part.rows, " rows, expected at most ",
                                 core::GramState::kMaxRows, " together"));
  }
  return absl::OkStatus();
}

void AddGramHead(const core::GramState::Parts& part,
                 core::GramState::Parts* whole) {
  whole->rows += part.rows;
  whole->left_out_rows += part.left_out_rows;
  whole->clipped += part.clipped;
}

absl::StatusOr<absl::Span<const int64_t>> GramAssembler::Add(
    int64_t piece, uint64_t checksum, absl::string_view bytes) {
  if (piece != kFirstGramPiece + next_) return Corrupt("lack pieces");
  if (checksum != PieceChecksum(version_, piece, bytes)) {
    return Corrupt("fail their checksum");
  }
  if (next_++ == 0) {
    v1::GramState message;
    if (bytes.size() < sizeof(expected_checksum_)) {
      return Corrupt("do not decode");
    }
    std::memcpy(&expected_checksum_, bytes.data(), sizeof(expected_checksum_));
    bytes.remove_prefix(sizeof(expected_checksum_));
    if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
      return Corrupt("do not decode");
    }
    head_.exponents.assign(message.step_exponent().begin(),
                           message.step_exponent().end());
    head_.part_size = static_cast<int64_t>(message.part_size());
    head_.rows = static_cast<int64_t>(message.rows());
    head_.left_out_rows = static_cast<int64_t>(message.left_out_rows());
    head_.clipped = static_cast<int64_t>(message.clipped_count());
    // The checksum covers them, so that only a defect could make them wrong.
    if (head_.part_size <= 0) return Corrupt("are invalid");
    sum_count_ = head_.sum_count();
    return absl::Span<const int64_t>();
  }
  const int64_t expected = std::min(kSumsPerPiece, sum_count_ - first_sum());
  if (expected <= 0 || static_cast<int64_t>(bytes.size()) !=
                           expected * static_cast<int64_t>(sizeof(int64_t))) {
    return Corrupt("have pieces of another size");
  }
  checksum_.Add(AsBytes(checksum));
  sums_.resize(static_cast<size_t>(expected));
  std::memcpy(sums_.data(), bytes.data(), bytes.size());
  return absl::MakeConstSpan(sums_);
}

absl::Status GramAssembler::Finish() const {
  if ((next_ - 1) * kSumsPerPiece < sum_count_) return Corrupt("lack pieces");
  return checksum_.Get() == expected_checksum_ ? absl::OkStatus()
                                               : Corrupt("fail their checksum");
}

absl::Status GramAssembler::Corrupt(absl::string_view what) const {
  return SourceCorruptError(version_.key, version_.source, what);
}

int64_t WriteGramBytes(const core::GramState::Parts* part) {
  // Bytes of a piece: as it is read, as numbers, and as it is written.
  constexpr int64_t kPieces =
      4 * kSumsPerPiece * static_cast<int64_t>(sizeof(int64_t));
  return kPieces +
         (part == nullptr
              ? 0
              : part->sum_count() * static_cast<int64_t>(sizeof(int64_t)));
}

absl::Status GramWriter::Begin(SqlConnection* connection,
                               const absl::optional<SourceVersion>& before,
                               const SourceVersion& now) {
  now_.emplace(now);
  if (before.has_value()) {
    before_.emplace(*before);
    read_.emplace(*before);
    absl::StatusOr<absl::optional<uint64_t>> found =
        ReadNext(connection, *before, kFirstGramPiece, &*read_, &sums_);
    if (!found.ok()) return found.status();
    written_.checksum_before = *found;
    if (!found->has_value()) read_.reset();
  }
  if (read_.has_value()) {
    head_ = read_->head();
  } else if (part_ != nullptr) {
    head_.exponents = part_->exponents;
    head_.part_size = part_->part_size;
  }
  if (part_ != nullptr) {
    if (absl::Status s = CheckGramHeads(head_, *part_); !s.ok()) return s;
    AddGramHead(*part_, &head_);
  }
  sum_count_ = head_.sum_count();
  return absl::OkStatus();
}

bool GramWriter::has_steps() const {
  return TakesSteps(sum_count_ - count_ * kSumsPerPiece);
}

absl::Status GramWriter::Step(SqlConnection* connection) {
  for (int i = 0; i < kPiecesPerTransaction; ++i) {
    if (absl::Status s = WriteNext(connection); !s.ok()) return s;
  }
  staged_count_ = count_;
  staged_checksum_ = checksum_.Get();
  return MarkPieces(connection, *now_);
}

absl::Status GramWriter::WriteNext(SqlConnection* connection) {
  const int64_t first = count_ * kSumsPerPiece;
  const auto count =
      static_cast<size_t>(std::min(kSumsPerPiece, sum_count_ - first));
  const int64_t piece = kFirstGramPiece + ++count_;
  if (read_.has_value()) {
    absl::StatusOr<absl::optional<uint64_t>> found =
        ReadNext(connection, *before_, piece, &*read_, &sums_);
    if (!found.ok()) return found.status();
    if (!found->has_value()) {
      return SourceCorruptError(before_->key, before_->source, "lack pieces");
    }
  } else {
    sums_.assign(count, 0);
  }
  if (part_ != nullptr) {
    const int64_t* const more = part_->code_sums.data() + first;
    absl::Status status = core::AddGramSums(absl::MakeConstSpan(more, count),
                                            absl::MakeSpan(sums_));
    if (!status.ok()) return status;
  }
  const absl::string_view bytes(reinterpret_cast<const char*>(sums_.data()),
                                count * sizeof(int64_t));
  absl::StatusOr<uint64_t> added = WritePiece(connection, *now_, piece, bytes);
  if (!added.ok()) return added.status();
  checksum_.Add(AsBytes(*added));
  written_.size_bytes += static_cast<int64_t>(bytes.size());
  return absl::OkStatus();
}

absl::Status GramWriter::CheckStaged(SqlConnection* connection) const {
  const std::unique_ptr<SqlStatement> row =
      connection->Prepare(kSelectGramChecksums);
  row->BindInt(1, now_->set_id);
  row->BindText(2, now_->key.tensor);
  row->BindText(3, now_->source);
  row->BindInt(4, now_->sequence);
  row->BindInt(5, kFirstGramPiece);
  row->BindInt(6, kFirstGramPiece + staged_count_);
  RowChecksum found_checksum;
  int64_t count = 0;
  while (true) {
    absl::StatusOr<bool> found = row->Step(kCannotAddGram);
    if (!found.ok()) return found.status();
    if (!*found) break;
    const auto checksum = static_cast<uint64_t>(row->Int(0));
    found_checksum.Add(AsBytes(checksum));
    ++count;
  }
  if (count == staged_count_ && found_checksum.Get() == staged_checksum_) {
    return absl::OkStatus();
  }
  return core::StoreUnavailableError(
      "another contribution of the same source and sequence was written "
      "meanwhile; send it again");
}

absl::StatusOr<WrittenGram> GramWriter::Finish(SqlConnection* connection) {
  if (!read_.has_value() && part_ == nullptr) return written_;
  if (is_staged()) {
    if (absl::Status s = CheckStaged(connection); !s.ok()) return s;
  }
  while (count_ * kSumsPerPiece < sum_count_) {
    if (absl::Status s = WriteNext(connection); !s.ok()) return s;
  }
  if (read_.has_value()) {
    if (absl::Status s = read_->Finish(); !s.ok()) return s;
  }
  const std::string bytes = HeadBytes(head_, checksum_.Get());
  absl::StatusOr<uint64_t> added =
      WritePiece(connection, *now_, kFirstGramPiece, bytes);
  if (!added.ok()) return added.status();
  written_.size_bytes += static_cast<int64_t>(bytes.size());
  written_.checksum = *added;
  written_.end_piece = kFirstGramPiece + count_ + 1;
  return written_;
}

}  // namespace quantd::server
