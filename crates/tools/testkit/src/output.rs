//! Figures from perftest's output.

/// The columns of a latency test over a fixed number of messages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latency {
    /// The typical (median) half round trip in µs.
    pub typical_us: f64,
    /// The mean in µs.
    pub mean_us: f64,
    /// The standard deviation in µs.
    pub deviation_us: f64,
    /// The 99th percentile in µs.
    pub p99_us: f64,
}

/// The average bandwidth that `ib_*_bw --report_gbits` prints for messages of `size` bytes.
pub fn bandwidth_gbps(output: &str, size: u64) -> Option<f64> {
    // bytes, iterations, peak, average, message rate
    row(output, size)?.get(3).copied()
}

/// What `ib_*_lat -n` prints for messages of `size` bytes.
pub fn latency_us(output: &str, size: u64) -> Option<Latency> {
    // bytes, iterations, min, max, typical, average, deviation, 99 %, 99.9 %
    let row = row(output, size)?;
    Some(Latency {
        typical_us: *row.get(4)?,
        mean_us: *row.get(5)?,
        deviation_us: *row.get(6)?,
        p99_us: *row.get(7)?,
    })
}

/// The line of figures that begins with `size`.
fn row(output: &str, size: u64) -> Option<Vec<f64>> {
    output.lines().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        if words.len() < 5 || words[0] != size.to_string() {
            return None;
        }
        words.iter().map(|w| w.parse().ok()).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_row() {
        let output = " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   \
                      MsgRate[Mpps]\n 65536      96500            0.00               \
                      25.30              0.048256\n---\n";
        assert_eq!(bandwidth_gbps(output, 65536), Some(25.30));
        assert_eq!(bandwidth_gbps(output, 8), None);
        let output = " #bytes #iterations t_min[usec] t_max[usec] t_typical[usec] t_avg[usec] \
                      t_stdev 99% 99.9%\n 8       1000          3.00     20.0   5.50   5.61   \
                      0.70   7.30   9.00\n";
        assert_eq!(
            latency_us(output, 8),
            Some(Latency { typical_us: 5.5, mean_us: 5.61, deviation_us: 0.7, p99_us: 7.3 })
        );
        assert_eq!(latency_us("8 1 2 3", 8), None);
    }
}
