//! The adaptive choice on the grid of the paper's Figure 9: after 32 messages of warm-up its expected time is near that of the better fixed choice.

use unbroken_codes::Code;
use unbroken_model::choose::Objective;
use unbroken_model::{Link, Loss, Scheme};
use unbroken_sdr::adapt::{Choice, Estimate};

/// A seeded generator of losses.
struct Lots(u64);

impl Lots {
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 ^ self.0 >> 29) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// How many of `n` chunks are lost, each with the chance `p`: by the gaps between losses.
    fn losses(&mut self, n: u64, p: f64) -> u64 {
        if p <= 0.0 {
            return 0;
        }
        let (mut at, mut lost) = (0.0, 0);
        loop {
            at += 1.0 + ((1.0 - self.uniform()).ln() / (-p).ln_1p()).floor();
            if at > n as f64 {
                return lost;
            }
            lost += 1;
        }
    }
}

#[test]
fn after_the_warm_up_it_is_near_the_better_fixed_choice() {
    let fixed = [Scheme::SrNack, Scheme::Ec(Code::mds(32, 8).unwrap())];
    let (mut lots, mut worst) = (Lots(7), (0.0f64, 0u64, 0.0));
    for size_log2 in (17..=33).step_by(2) {
        for loss in [0.0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 3e-2] {
            let link = Link { loss: Loss::Chunk(loss), ..Link::default() };
            let (channel, chunks) = (link.channel().unwrap(), link.chunks(1 << size_log2));
            let mut estimate = Estimate::default();
            for _ in 0..32 {
                estimate.note(chunks, lots.losses(chunks, loss));
            }
            let injection_ns = (channel.injection_s * 1e9) as u64;
            let rtt_us = (channel.rtt_s * 1e6) as u64;
            let scheme = estimate.scheme(Choice::Adaptive(Objective::Mean), rtt_us, injection_ns, chunks, chunks);
            let ours_s = scheme.message(&channel, chunks).mean_s();
            let best_s = fixed.iter().map(|s| s.message(&channel, chunks).mean_s()).fold(f64::INFINITY, f64::min);
            if ours_s / best_s > worst.0 {
                worst = (ours_s / best_s, 1 << size_log2, loss);
            }
        }
    }
    println!("at worst {:.3} of the better fixed choice, for {} bytes at a loss of {}", worst.0, worst.1, worst.2);
    assert!(worst.0 <= 1.1, "{worst:?}");
}
