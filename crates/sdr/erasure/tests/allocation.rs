//! Encoding and recovering allocate nothing.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use unbroken_erasure::{ChunkSet, Code, Kernel};

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// Counts what each thread allocates.
struct Counting;

// SAFETY: the system's allocator does it; the counter is plain data that needs no memory of its
// own.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn nothing_is_allocated() {
    let (mut data, mut parity) = (vec![7; 32 * 1000 - 1], vec![0; 8 * 1000]);
    let lost: ChunkSet = (3..11).collect();
    let count = || ALLOCATIONS.with(Cell::get);
    let before = count();
    drop(std::hint::black_box(vec![1_u8; 10]));
    assert_eq!(count(), before + 1, "the counter counts");
    for code in [Code::mds(32, 8), Code::xor(32, 8)] {
        let code = code.unwrap();
        for kernel in Kernel::available() {
            code.encode_region(&kernel, &data, &mut parity, 1000).unwrap();
            assert_eq!(code.recover_region(&kernel, &mut data, &parity, 1000, &lost), Ok(8));
        }
    }
    assert_eq!(count(), before + 1);
}
