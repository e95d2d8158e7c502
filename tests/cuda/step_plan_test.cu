// A step's plan shared by calls, and calls that begin before the kernel ahead of them has ended.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/ptx.cuh"
#include "pgqa/cuda_graph.h"
#include "pgqa/step_plan.h"
#include "tests/cuda/decode_run.cuh"

namespace pgqa {
namespace {

using testing::Check;
using testing::DeviceArray;
using testing::Problem;
using testing::ProblemSpec;
using testing::Runner;

constexpr int kManyTimes = 1000;

ProblemSpec SpecOfBatch(int32_t batch) {
  ProblemSpec spec;
  spec.kv_lens.clear();
  for (int32_t r = 0; r < batch; ++r) spec.kv_lens.push_back(r * 37 % 120);
  return spec;
}

StepPlanArgs PlanArgs(const Problem& problem, void* step_plan) {
  return {problem.Args(nullptr, nullptr).table, problem.spec().window_left, step_plan};
}

class StepPlanOfBatch : public ::testing::TestWithParam<int32_t> {};

TEST_P(StepPlanOfBatch, GivesTheBitsOfACallThatPlansForItself) {
  for (const int32_t window_left : {-1, 20}) {
    ProblemSpec spec = SpecOfBatch(GetParam());
    spec.window_left = window_left;
    const Problem problem(spec);
    const Runner runner(problem);
    ASSERT_TRUE(runner.Launch().ok());
    const std::vector<uint16_t> expected = runner.out().Read();
    const DeviceArray<unsigned char> step_plan(static_cast<size_t>(StepPlanBytes(runner.plan())));
    step_plan.Fill(0xFF);
    runner.Forget();
    DecodeArgs args = problem.Args(runner.out().data(), runner.lse().data());
    args.step_plan = step_plan.data();
    ASSERT_TRUE(PlanStep(runner.plan(), PlanArgs(problem, step_plan.data()), nullptr).ok());
    ASSERT_TRUE(Decode(runner.plan(), args, runner.View(), nullptr).ok());
    runner.CheckResult();
    EXPECT_EQ(runner.out().Read(), expected);
  }
}

INSTANTIATE_TEST_SUITE_P(Batches, StepPlanOfBatch, ::testing::Values(1, 33, 64, 65, 300));

TEST(StepPlan, RefusesWhatDoesNotFit) {
  const Problem problem(SpecOfBatch(3));
  const Runner runner(problem);
  const DeviceArray<unsigned char> step_plan(static_cast<size_t>(StepPlanBytes(runner.plan())));
  const StepPlanArgs good = PlanArgs(problem, step_plan.data());
  const auto message = [&](const auto& change) {
    StepPlanArgs args = good;
    change(&args);
    return std::string(PlanStep(runner.plan(), args, nullptr).message());
  };
  EXPECT_EQ(message([](StepPlanArgs* a) { a->step_plan = nullptr; }),
            "step_plan: got null, expected device memory");
  EXPECT_EQ(message([&](StepPlanArgs* a) { a->step_plan = step_plan.data() + 4; }),
            "step_plan: got an address that is not 16-byte aligned, expected 16-byte aligned rows");
  EXPECT_EQ(message([](StepPlanArgs* a) { a->table.page_size = 8; }),
            "page_size: got 8, expected 16 as planned");
  EXPECT_EQ(message([](StepPlanArgs* a) { a->window_left = -2; }).rfind("window_left: got -2", 0),
            0);
  EXPECT_EQ(message([](StepPlanArgs* a) { a->dependence = Dependence::kTensors; }),
            "dependence: got 2, expected kStream or kAny");
  EXPECT_EQ(message([](StepPlanArgs* a) { a->table.batch = -1; }).rfind("batch: got -1", 0), 0);
  LaunchPlan of_cpu = MakeCpuLaunchPlan(problem.Shape(), 2).value();
  EXPECT_EQ(PlanStep(of_cpu, good, nullptr).message().substr(0, 5), "plan:");
  EXPECT_TRUE(PlanStep(runner.plan(), good, nullptr).ok());
  Check(cudaDeviceSynchronize());
}

// Lets the next kernel be launched at once, and only then, slowly, copies the page table and the queries.
__global__ void ProduceLate(const int32_t* indptr, int32_t* produced_indptr, int32_t num_rows,
                            const uint16_t* q, uint16_t* produced_q, int32_t q_elements) {
  ptx::AllowDependentGrid();
  const int64_t start = clock64();
  while (clock64() - start < 3000) continue;
  for (int32_t i = threadIdx.x; i < num_rows; i += blockDim.x) produced_indptr[i] = indptr[i];
  for (int32_t i = threadIdx.x; i < q_elements; i += blockDim.x) produced_q[i] = q[i];
}

TEST(DependentLaunch, WaitsForAProducerJustBefore) {
  const Problem problem(SpecOfBatch(5));
  const Runner runner(problem);
  ASSERT_TRUE(runner.Launch().ok());
  const std::vector<uint16_t> expected = runner.out().Read();
  const DeviceArray<int32_t> indptr(6);
  const DeviceArray<uint16_t> q(problem.OutElements());
  const CudaStream stream = CudaStream::Create().value();
  DecodeArgs args = problem.Args(runner.out().data(), runner.lse().data());
  const void* real_q = args.q;
  args.q = q.data();
  args.table.indptr = indptr.data();
  args.dependence = Dependence::kAny;
  for (int run = 0; run < kManyTimes; ++run) {
    Check(cudaMemsetAsync(indptr.data(), 0, 6 * sizeof(int32_t), stream.get()));
    Check(cudaMemsetAsync(q.data(), 0xFF, q.size() * sizeof(uint16_t), stream.get()));
    ProduceLate<<<1, 128, 0, stream.get()>>>(problem.indptr.data(), indptr.data(), 6,
                                             static_cast<const uint16_t*>(real_q), q.data(),
                                             static_cast<int32_t>(q.size()));
    ASSERT_TRUE(Decode(runner.plan(), args, runner.View(), stream.get()).ok());
    if (run % 100 != 99) continue;
    Check(cudaStreamSynchronize(stream.get()));
    ASSERT_EQ(runner.out().Read(), expected) << run;
  }
}

TEST(DependentLaunch, CallsThatShareAWorkspaceDoNotDisturbEachOther) {
  ProblemSpec spec;
  spec.kv_lens = {4000, 17, 0, 900};  // split over workers, so that partials are written and merged
  const Problem problem(spec);
  const Runner first(problem);
  const Runner second(problem);
  ASSERT_TRUE(first.Launch().ok());
  const std::vector<uint16_t> expected = first.out().Read();
  const CudaStream stream = CudaStream::Create().value();
  for (const Dependence dependence :
       {Dependence::kAny, Dependence::kTensors, Dependence::kNothing}) {
    first.Forget();
    second.Forget();
    for (int run = 0; run < kManyTimes; ++run) {
      const Runner& runner = run % 2 == 0 ? first : second;
      DecodeArgs args = problem.Args(runner.out().data(), runner.lse().data());
      args.dependence = run == 0 ? Dependence::kStream : dependence;
      ASSERT_TRUE(Decode(first.plan(), args, first.View(), stream.get()).ok());
    }
    Check(cudaStreamSynchronize(stream.get()));
    EXPECT_EQ(first.out().Read(), expected);
    EXPECT_EQ(second.out().Read(), expected);
  }
}

}  // namespace
}  // namespace pgqa
