//! Encoding and recovering: which multiples of which chunks, over which columns.
//!
//! Lost data chunks are what solves a system of equations, one for each parity chunk that is used:
//! parity = sum of multiples of data chunks. With as many equations as there are lost chunks the
//! system is eliminated once, on coefficients; the chunks themselves are then read once. A square
//! part of a Cauchy matrix has no zero minors, so elimination meets no zero on its diagonal.
//!
//! A short last chunk makes two passes: one over the columns that it has, one over the others
//! without it.

use std::ops::Range;

use crate::field::{inverse, multiply};
use crate::kernel::Backend;
use crate::{ChunkSet, Code, CodeError, Kind, MAX_DATA, MAX_PARITY};

/// A list on the stack. Nothing is pushed beyond its end: codes are bounded.
struct Few<T, const N: usize> {
    items: [T; N],
    len: usize,
}

impl<T: Default, const N: usize> Few<T, N> {
    fn new() -> Few<T, N> {
        Few { items: std::array::from_fn(|_| T::default()), len: 0 }
    }

    fn push(&mut self, item: T) {
        self.items[self.len] = item;
        self.len += 1;
    }

    fn extend(mut self, items: impl Iterator<Item = T>) -> Few<T, N> {
        items.for_each(|item| self.push(item));
        self
    }
}

impl<T, const N: usize> std::ops::Deref for Few<T, N> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.items[..self.len]
    }
}

impl<T, const N: usize> std::ops::DerefMut for Few<T, N> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.items[..self.len]
    }
}

/// A part of the columns, and how many data chunks reach into it.
struct Pass {
    columns: Range<usize>,
    width: usize,
}

/// At most two; none is empty.
type Passes = std::iter::Filter<std::array::IntoIter<Pass, 2>, fn(&Pass) -> bool>;

impl Code {
    /// Makes the parity chunks of data chunks.
    ///
    /// # Errors
    /// Chunks whose number or lengths do not fit: all are as long as the first data chunk, but the
    /// last data chunk may be shorter.
    pub fn encode(
        self,
        backend: &dyn Backend,
        data: &[&[u8]],
        parity: &mut [&mut [u8]],
    ) -> Result<(), CodeError> {
        for Pass { columns, width } in
            self.passes(data.iter().map(|d| d.len()), parity.iter().map(|p| p.len()))?
        {
            let inputs = Few::<&[u8], MAX_DATA>::new()
                .extend(data[..width].iter().map(|d| &d[columns.clone()]));
            let outputs = parity.iter_mut().map(|p| &mut p[columns.clone()]);
            match self.kind() {
                Kind::Mds => {
                    let mut outputs = Few::<&mut [u8], MAX_PARITY>::new().extend(outputs);
                    let mut coefficients = [0; MAX_DATA * MAX_PARITY];
                    for (row, coefficients) in
                        coefficients.chunks_exact_mut(width).enumerate().take(self.parity())
                    {
                        (0..width).for_each(|column| {
                            coefficients[column] = self.coefficient(row, column)
                        });
                    }
                    backend.combine(&coefficients[..width * self.parity()], &inputs, &mut outputs);
                }
                Kind::Xor => {
                    for (group, output) in outputs.enumerate() {
                        let members = self
                            .group(group)
                            .filter(|&chunk| chunk < width)
                            .map(|chunk| inputs[chunk]);
                        backend.xor(&Few::<&[u8], MAX_DATA>::new().extend(members), output);
                    }
                }
            }
        }
        Ok(())
    }

    /// Brings lost data chunks back, each into its own place, and says how many. What is in the
    /// place of a lost chunk is not read; parity chunks stay as they are.
    ///
    /// # Errors
    /// Chunks that do not fit, as in [`Code::encode`]; a lost chunk that the code does not have;
    /// too many losses. Nothing was written then.
    pub fn recover(
        self,
        backend: &dyn Backend,
        data: &mut [&mut [u8]],
        parity: &[&[u8]],
        lost: &ChunkSet,
    ) -> Result<usize, CodeError> {
        let passes = self.passes(data.iter().map(|d| d.len()), parity.iter().map(|p| p.len()))?;
        if let Some(index) = lost.iter().find(|&chunk| chunk >= self.chunks()) {
            return Err(CodeError::NoSuchChunk { index, chunks: self.chunks() });
        }
        let lost_data = lost.iter().filter(|&chunk| chunk < self.data()).count();
        if !self.recovers(lost) {
            return Err(CodeError::Unrecoverable {
                data: lost_data,
                parity: lost.len() - lost_data,
            });
        }
        for pass in passes {
            match self.kind() {
                Kind::Mds => self.solve(backend, data, parity, lost, &pass),
                Kind::Xor => self.subtract(backend, data, parity, lost, &pass),
            }
        }
        Ok(lost_data)
    }

    /// [`Code::encode`] of chunks that lie one behind the other, each `chunk_bytes` long; of the
    /// data, the last may be shorter. `parity` has room for all parity chunks.
    ///
    /// # Errors
    /// Regions that do not hold as many chunks as the code has.
    pub fn encode_region(
        self,
        backend: &dyn Backend,
        data: &[u8],
        parity: &mut [u8],
        chunk_bytes: usize,
    ) -> Result<(), CodeError> {
        let used = self.region(data.len(), parity.len(), chunk_bytes)?;
        let data = Few::<&[u8], MAX_DATA>::new().extend(data.chunks(chunk_bytes));
        let parity = parity.chunks_mut(chunk_bytes).map(|p| &mut p[..used]);
        self.encode(backend, &data, &mut Few::<&mut [u8], MAX_PARITY>::new().extend(parity))
    }

    /// [`Code::recover`] of chunks that lie one behind the other, as in [`Code::encode_region`].
    ///
    /// # Errors
    /// Regions that do not hold as many chunks as the code has, and what [`Code::recover`] says.
    pub fn recover_region(
        self,
        backend: &dyn Backend,
        data: &mut [u8],
        parity: &[u8],
        chunk_bytes: usize,
        lost: &ChunkSet,
    ) -> Result<usize, CodeError> {
        let used = self.region(data.len(), parity.len(), chunk_bytes)?;
        let mut data = Few::<&mut [u8], MAX_DATA>::new().extend(data.chunks_mut(chunk_bytes));
        let parity =
            Few::<&[u8], MAX_PARITY>::new().extend(parity.chunks(chunk_bytes).map(|p| &p[..used]));
        self.recover(backend, &mut data, &parity, lost)
    }

    /// Checks regions, and gives the bytes of a parity chunk that are used: fewer only where there
    /// is one data chunk, and it is short.
    fn region(self, data: usize, parity: usize, chunk_bytes: usize) -> Result<usize, CodeError> {
        let wrong = |given, chunks| CodeError::Region { given, chunks, chunk_bytes };
        if chunk_bytes == 0 || data.div_ceil(chunk_bytes) != self.data() {
            return Err(wrong(data, self.data()));
        }
        if Some(parity) != chunk_bytes.checked_mul(self.parity()) {
            return Err(wrong(parity, self.parity()));
        }
        Ok(data.min(chunk_bytes))
    }

    /// Checks chunks, and gives the passes over them.
    fn passes(
        self,
        mut data: impl ExactSizeIterator<Item = usize>,
        parity: impl ExactSizeIterator<Item = usize>,
    ) -> Result<Passes, CodeError> {
        if data.len() != self.data() {
            return Err(CodeError::DataGiven { given: data.len(), expected: self.data() });
        }
        if parity.len() != self.parity() {
            return Err(CodeError::ParityGiven { given: parity.len(), expected: self.parity() });
        }
        let expected = data.next().unwrap_or(0);
        if expected == 0 {
            return Err(CodeError::Length { index: 0, given: 0, expected: 1 });
        }
        let last = self.data() - 1;
        let mut shortest = expected;
        for (index, given) in (1..).zip(data.chain(parity)) {
            if index == last && (1..=expected).contains(&given) {
                shortest = given;
            } else if given != expected {
                return Err(CodeError::Length { index, given, expected });
            }
        }
        let all = Pass { columns: 0..shortest, width: self.data() };
        let without_last = Pass { columns: shortest..expected, width: last };
        Ok([all, without_last].into_iter().filter(|pass| !pass.columns.is_empty()))
    }

    /// A pass of MDS recovery: lost chunks from parity chunks and the other data chunks.
    fn solve(
        self,
        backend: &dyn Backend,
        data: &mut [&mut [u8]],
        parity: &[&[u8]],
        lost: &ChunkSet,
        Pass { columns, width }: &Pass,
    ) {
        let (mut inputs, mut outputs) =
            (Few::<&[u8], MAX_DATA>::new(), Few::<&mut [u8], MAX_PARITY>::new());
        let (mut unknown, mut known) =
            (Few::<usize, MAX_PARITY>::new(), Few::<usize, MAX_DATA>::new());
        for (column, chunk) in data[..*width].iter_mut().enumerate() {
            if lost.contains(column) {
                outputs.push(&mut chunk[columns.clone()]);
                unknown.push(column);
            } else {
                inputs.push(&chunk[columns.clone()]);
                known.push(column);
            }
        }
        let alive = (0..self.parity()).filter(|row| !lost.contains(self.data() + row));
        let rows = Few::<usize, MAX_PARITY>::new().extend(alive.take(unknown.len()));
        rows.iter().for_each(|&row| inputs.push(&parity[row][columns.clone()]));
        let mut coefficients = [0; MAX_DATA * MAX_PARITY];
        let coefficients = &mut coefficients[..inputs.len() * outputs.len()];
        self.eliminate(&rows, &unknown, &known, coefficients);
        backend.combine(coefficients, &inputs, &mut outputs);
    }

    /// What the known data chunks, and behind them the parity chunks of `rows`, are multiplied by
    /// to give the unknown ones.
    fn eliminate(
        self,
        rows: &[usize],
        unknown: &[usize],
        known: &[usize],
        coefficients: &mut [u8],
    ) {
        let (e, width) = (rows.len(), known.len() + rows.len());
        // Each row says: sum of unknown = sum of known + parity. (Subtraction is addition here.)
        let mut left = [[0; MAX_PARITY]; MAX_PARITY];
        for (i, (&row, right)) in rows.iter().zip(coefficients.chunks_exact_mut(width)).enumerate()
        {
            unknown
                .iter()
                .zip(&mut left[i])
                .for_each(|(&column, c)| *c = self.coefficient(row, column));
            known
                .iter()
                .zip(&mut *right)
                .for_each(|(&column, c)| *c = self.coefficient(row, column));
            right[known.len() + i] = 1;
        }
        for pivot in 0..e {
            let scale = inverse(left[pivot][pivot]);
            left[pivot][pivot..e].iter_mut().for_each(|c| *c = multiply(scale, *c));
            let (above, rest) = coefficients.split_at_mut(pivot * width);
            let (own, below) = rest.split_at_mut(width);
            own.iter_mut().for_each(|c| *c = multiply(scale, *c));
            let own_left = left[pivot];
            let others = above.chunks_exact_mut(width).chain(below.chunks_exact_mut(width));
            for (row, right) in (0..e).filter(|&row| row != pivot).zip(others) {
                let times = left[row][pivot];
                left[row][pivot..e]
                    .iter_mut()
                    .zip(&own_left[pivot..e])
                    .for_each(|(c, o)| *c ^= multiply(times, *o));
                right.iter_mut().zip(&*own).for_each(|(c, o)| *c ^= multiply(times, *o));
            }
        }
    }

    /// A pass of XOR recovery: each lost chunk is the sum of the others of its group and their
    /// parity.
    fn subtract(
        self,
        backend: &dyn Backend,
        data: &mut [&mut [u8]],
        parity: &[&[u8]],
        lost: &ChunkSet,
        Pass { columns, width }: &Pass,
    ) {
        for wanted in lost.iter().filter(|chunk| chunk < width) {
            let group = wanted % self.parity();
            // The parity chunk takes the place of the lost one; so a group never has more inputs
            // than data chunks.
            let mut inputs = Few::<&[u8], MAX_DATA>::new();
            inputs.push(&parity[group][columns.clone()]);
            let mut place = None;
            for (index, chunk) in
                data[..*width].iter_mut().enumerate().skip(group).step_by(self.parity())
            {
                if index == wanted {
                    place = Some(&mut chunk[columns.clone()]);
                } else {
                    inputs.push(&chunk[columns.clone()]);
                }
            }
            if let Some(place) = place {
                backend.xor(&inputs, place);
            }
        }
    }
}
