// The torch operator of bags that are read from several tables.

#include "embedding_bags.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>

#include "counters.h"
#include "from_python.h"
#include "tensors.h"

namespace kd::bags {
namespace {

// A thread is worth waking for some 20 microseconds of work.
constexpr double kNumbersPerThread = 1 << 14;
constexpr int64_t kSharesPerThread = 4;

struct Described {
  std::vector<Tensor> tables, numbers, begins, factors;  // in one piece
  at::IntArrayRef padding;
  bool mean;
  int64_t bags, width;  // of all tables beside each other
};

void check_begins(const Tensor& begins, int64_t numbers) {
  const auto* const begin = begins.const_data_ptr<int64_t>();
  const int64_t count = begins.numel();
  TORCH_CHECK(count == 0 || begin[0] == 0, "the first bag is to begin at 0, not at ", begin[0]);
  for (int64_t i = 0; i < count; i++) {
    const int64_t end = i + 1 < count ? begin[i + 1] : numbers;
    TORCH_CHECK(begin[i] <= end, "bag ", i, " of an embedding begins at ", begin[i],
                " and ends at ", end, "; there are ", numbers, " numbers");
  }
}

std::vector<Tensor> in_one_piece(at::TensorList tensors, at::ScalarType type) {
  std::vector<Tensor> result;
  result.reserve(tensors.size());
  for (const Tensor& tensor : tensors) result.push_back(tensor.to(type).contiguous());
  return result;
}

template <class Element>
std::vector<Table> tables_of(const Described& d, const Tensor& out) {
  std::vector<Table> tables;
  auto* column = static_cast<Element*>(out.mutable_data_ptr());
  for (size_t i = 0; i < d.tables.size(); i++) {
    const Tensor& rows = d.tables[i];
    const void* const factors = d.factors.empty() ? nullptr : d.factors[i].const_data_ptr();
    tables.push_back({rows.const_data_ptr(), rows.size(0), rows.size(1),
                      d.numbers[i].const_data_ptr<int64_t>(), d.numbers[i].numel(),
                      d.begins[i].const_data_ptr<int64_t>(), d.begins[i].numel(), factors,
                      d.padding[i], column});
    column += rows.size(1);
  }
  return tables;
}

double work_of(const std::vector<Table>& tables) {
  double work = 0;
  for (const Table& table : tables)
    work += static_cast<double>(table.numbers_count) * static_cast<double>(table.width);
  return work;
}

// Each table's bags in shares of equal size.
template <class Element, bool has_factors>
void compute(const Described& d, const Tensor& out) {
  const std::vector<Table> tables = tables_of<Element>(d, out);
  const int64_t count = static_cast<int64_t>(tables.size());
  const int team = useful_threads(threads(), work_of(tables), kNumbersPerThread);
  const int64_t shares = team == 1 ? 1 : std::min(d.bags, ceil_div(kSharesPerThread * team, count));
  std::atomic<int64_t> wrong_table{kNoFault}, wrong_number{0};
  for_each_item(count * shares, team, [&](int64_t item) {
    const Table& table = tables[static_cast<size_t>(item / shares)];
    const Range bags = part_of(d.bags, item % shares, shares);
    const int64_t fault = Bags<Element, has_factors>(table, d.mean, d.width).compute(bags);
    int64_t none = kNoFault;
    if (fault != kNoFault && wrong_table.compare_exchange_strong(none, item / shares))
      wrong_number = table.numbers[fault];
  });
  if (wrong_table != kNoFault) {
    const int64_t i = wrong_table;
    TORCH_CHECK(false, "number ", wrong_number.load(), " is no row of table ", i,
                " of an embedding bag, which has ", tables[static_cast<size_t>(i)].count, " rows");
  }
}

template <class Element>
void compute(const Described& d, const Tensor& out) {
  d.factors.empty() ? compute<Element, false>(d, out) : compute<Element, true>(d, out);
}

void check(at::TensorList tables, at::TensorList numbers, at::TensorList begins,
           at::TensorList factors, at::IntArrayRef padding) {
  const size_t count = tables.size();
  TORCH_CHECK(count > 0 && numbers.size() == count && begins.size() == count &&
                  (factors.empty() || factors.size() == count) && padding.size() == count,
              count, " tables of embedding bags have numbers of ", numbers.size(), ", bags of ",
              begins.size(), ", factors of ", factors.size(), ", padding of ", padding.size());
  for (size_t i = 0; i < count; i++) {
    TORCH_CHECK(tables[i].dim() == 2 && tables[i].scalar_type() == tables[0].scalar_type(), "table ",
                i, " of embedding bags is ", tables[i].sizes(), " of ", tables[i].scalar_type(),
                ", the first one is ", tables[0].sizes(), " of ", tables[0].scalar_type());
    TORCH_CHECK(numbers[i].dim() == 1 && begins[i].dim() == 1 &&
                    begins[i].size(0) == begins[0].size(0),
                "the bags of table ", i, " are ", begins[i].sizes(), " of numbers of ",
                numbers[i].sizes());
    TORCH_CHECK(factors.empty() || factors[i].sizes() == numbers[i].sizes(), "table ", i,
                " has factors of ", factors[i].sizes(), " and numbers of ", numbers[i].sizes());
  }
}

// Bags of all tables, side by side. `with_end`: the last of `begins` is the end of the last bag.
Tensor embedding_bags(at::TensorList tables, at::TensorList numbers, at::TensorList begins,
                      at::TensorList factors, at::IntArrayRef padding, bool mean, bool with_end) {
  check(tables, numbers, begins, factors, padding);
  const at::ScalarType type = tables[0].scalar_type();
  Described d{in_one_piece(tables, type),
              in_one_piece(numbers, at::kLong),
              in_one_piece(begins, at::kLong),
              in_one_piece(factors, type),
              padding,
              mean,
              0,
              0};
  for (size_t i = 0; i < tables.size(); i++) {
    check_begins(d.begins[i], d.numbers[i].numel());
    d.width += tables[i].size(1);
  }
  d.bags = std::max<int64_t>(d.begins[0].numel() - with_end, 0);
  const Tensor out = at::empty({d.bags, d.width}, tables[0].options());
  count(kEmbeddingBag);
  if (out.numel() == 0) return out;
  if (type == at::kFloat) return compute<float>(d, out), out;
  if (type == at::kBFloat16) return compute<BFloat16>(d, out), out;
  TORCH_CHECK(type == at::kHalf, "bags of ", type, " are not read here");
  return compute<Half>(d, out), out;
}

const from_python::Offered offered("openmp_embedding_bags", from_python::entry<embedding_bags>);

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_dispatch, library) {
  library.def(
      "openmp_embedding_bags(Tensor[] tables, Tensor[] numbers, Tensor[] begins, "
      "Tensor[] factors, int[] padding, bool mean, bool with_end) -> Tensor");
}

TORCH_LIBRARY_IMPL(kernel_dispatch, CPU, library) {
  library.impl("openmp_embedding_bags", embedding_bags);
}

}  // namespace kd::bags
