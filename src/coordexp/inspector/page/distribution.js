"use strict";
// Distributions over the 1000 bins of a coordinate: that of the model, and the soft target it is trained towards.
const distribution = (() => {
  const BINS = 1000;
  const nearest = (target) => Math.min(BINS - 1, Math.max(0, Math.floor(target + 0.5)));

  // Expands runs of [first bin, ten-thousandths...]. `known` is their sum: small probabilities were not stored.
  function expand(runs) {
    const p = new Float64Array(BINS);
    let known = 0;
    for (const [first, ...shares] of runs) {
      shares.forEach((share, k) => {
        p[first + k] = share / 10000;
        known += share / 10000;
      });
    }
    return { p, known };
  }

  // The Gaussian that the loss uses. It sums to one over the bins within `truncate`.
  function softTarget(target, { sigma, truncate }) {
    const q = new Float64Array(BINS);
    const least = Math.abs(nearest(target) - target);
    let sum = 0;
    for (let bin = 0; bin < BINS; bin += 1) {
      const offset = Math.abs(bin - target);
      if (truncate !== null && offset > truncate) continue;
      q[bin] = Math.exp((-0.5 * (offset ** 2 - least ** 2)) / sigma ** 2);
      sum += q[bin];
    }
    return q.map((value) => value / sum);
  }

  function expected(p) {
    let sum = 0;
    let weighted = 0;
    p.forEach((share, bin) => {
      sum += share;
      weighted += share * bin;
    });
    return sum ? weighted / sum : null;
  }

  // The Wasserstein-1 distance in bins, with p scaled to its known part.
  function distance(p, q, known) {
    let difference = 0;
    let total = 0;
    for (let bin = 0; bin < BINS; bin += 1) {
      difference += p[bin] / known - q[bin];
      total += Math.abs(difference);
    }
    return total;
  }

  // The bins between which 99 % of p lies.
  function body(p, known) {
    let low = 0;
    let high = BINS - 1;
    for (let sum = p[low]; sum < 0.005 * known; sum += p[low]) low += 1;
    for (let sum = p[high]; sum < 0.005 * known; sum += p[high]) high -= 1;
    return [low, high];
  }

  return { BINS, nearest, expand, softTarget, expected, distance, body };
})();
