//! What is looked at in a file before LMDB maps it, since LMDB believes what it maps and a wrong
//! offset would end the process.
//!
//! A file that other processes have open cannot be made anew, so it is checked: both meta pages,
//! then every page that the newer one reaches (LMDB's format, version 1): the kind of each page,
//! that its nodes fill it without gap or overlap, that no page is used twice, and that the free
//! list names only pages that nothing else uses. Values are checked when they are read.
//!
//! Processes may commit meanwhile. LMDB never touches the pages that the newest commit reaches, so
//! a verdict stands if the meta pages did not change; else it is looked at again. A file that never
//! rests is one that others work with successfully.

use std::fs;
use std::io;
use std::path::Path;

use crate::error::{DirectoryError, Result};

/// The size of a page: that of the machine's, which for LMDB is 4,096 bytes here.
const PAGE: usize = 4096;
/// Of a page: number u64, padding u16, flags u16, end of the pointers u16, begin of the nodes u16.
const PAGE_HEADER: usize = 16;
/// Of a node: low and high half of the data's size (or of a page number) u16 each, flags u16, size
/// of the key u16.
const NODE_HEADER: usize = 8;
const MAX_KEY: usize = 511;
const MAX_DEPTH: u16 = 32;
const NO_PAGE: u64 = u64::MAX;
const MAGIC: u32 = 0xbeef_c0de;
const VERSION: u32 = 1;
/// Looks at a file that changes under our hands.
const TRIES: usize = 16;

const BRANCH: u16 = 1;
const LEAF: u16 = 2;
const OVERFLOW: u16 = 4;
const META: u16 = 8;
const BIG: u16 = 1;
const SUB_TABLE: u16 = 2;

type Verdict<T> = std::result::Result<T, String>;

/// Errors if the file of the directory `folder` is not a whole LMDB file with our tables. A missing
/// file is none.
pub(crate) fn check(folder: &Path, file: &Path, limit_bytes: usize) -> Result<()> {
    for _ in 0..TRIES {
        let bytes = match fs::metadata(file) {
            Ok(meta) if meta.len() > limit_bytes as u64 => {
                return Err(DirectoryError::damaged(
                    folder,
                    format!("data.mdb has {} bytes", meta.len()),
                ));
            }
            Ok(_) => fs::read(file).map_err(DirectoryError::io(folder, "read its file"))?,
            // LMDB makes it.
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(DirectoryError::io(folder, "look at its file")(e)),
        };
        let Err(what) = verdict(&bytes, limit_bytes) else { return Ok(()) };
        let again = fs::read(file).map_err(DirectoryError::io(folder, "read its file"))?;
        if again.get(..2 * PAGE) == bytes.get(..2 * PAGE) {
            return Err(DirectoryError::damaged(folder, format!("data.mdb is damaged ({what})")));
        }
    }
    Ok(())
}

/// Whether these bytes are such a file.
pub(crate) fn verdict(bytes: &[u8], limit_bytes: usize) -> Verdict<()> {
    let metas = [Meta::read(bytes, 0, limit_bytes)?, Meta::read(bytes, 1, limit_bytes)?];
    if metas[0].txn.abs_diff(metas[1].txn) > 1 {
        return Err(format!(
            "its commits {} and {} do not follow each other",
            metas[0].txn, metas[1].txn
        ));
    }
    let meta = &metas[usize::from(metas[0].txn < metas[1].txn)];
    let mut walk = Walk {
        bytes,
        last: meta.last,
        used: vec![false; usize::try_from(meta.last + 1).unwrap_or(0)],
    };
    let mut tables = Vec::new();
    walk.table(&meta.main, &mut |walk, node| {
        let Data::Table(table) = walk.data(node)? else {
            return Err("its main table has an entry that is none".into());
        };
        tables.push(table);
        Ok(())
    })?;
    for table in &tables {
        walk.table(table, &mut |walk, node| match walk.data(node)? {
            Data::Bytes(_) => Ok(()),
            Data::Table(_) => Err("a table lies in a table".into()),
        })?;
    }
    let mut free = Vec::new();
    walk.table(&meta.free, &mut |walk, node| {
        let Data::Bytes(list) = walk.data(node)? else {
            return Err("a table lies in the free list".into());
        };
        if node.key.len() != 8 || list.len() % 8 != 0 {
            return Err("an entry of the free list is none".into());
        }
        let mut numbers = list.chunks_exact(8).map(|n| u64_at(n, 0));
        let count = numbers.next().ok_or("an entry of the free list is empty")?;
        if count > numbers.len() as u64 {
            return Err("an entry of the free list is too short".into());
        }
        let numbers: Vec<u64> = numbers.take(count as usize).collect();
        if numbers.windows(2).any(|n| n[0] <= n[1]) {
            return Err("the free list is out of order".into());
        }
        free.extend(numbers);
        Ok(())
    })?;
    free.into_iter().try_for_each(|page| walk.use_page(page))
}

/// A meta page.
struct Meta {
    free: Table,
    main: Table,
    last: u64,
    txn: u64,
}

impl Meta {
    fn read(bytes: &[u8], index: usize, limit_bytes: usize) -> Verdict<Meta> {
        let page =
            bytes.get(index * PAGE..(index + 1) * PAGE).ok_or("it is shorter than two pages")?;
        let body = &page[PAGE_HEADER..];
        let wrong = |what: &str| Err(format!("{what} in meta page {index}"));
        if u16_at(page, 10) & META == 0 || u32_at(body, 0) != MAGIC {
            return wrong("no LMDB mark");
        }
        if u32_at(body, 4) != VERSION {
            return wrong("another version");
        }
        // magic u32, version u32, address u64, map size u64, free table, main table, last page u64,
        // commit u64
        let (free, main) = (Table::read(&body[24..72]), Table::read(&body[72..120]));
        if free.pad as usize != PAGE {
            return wrong("another page size");
        }
        let meta = Meta { free, main, last: u64_at(body, 120), txn: u64_at(body, 128) };
        if meta.txn != 0 && meta.txn % 2 != index as u64 {
            return wrong("a commit of the other");
        }
        if meta.last < 1 || meta.last >= (limit_bytes / PAGE) as u64 {
            return wrong("a wrong last page");
        }
        Ok(meta)
    }
}

/// `struct MDB_db`: one table.
struct Table {
    pad: u32,
    flags: u16,
    depth: u16,
    entries: u64,
    root: u64,
}

impl Table {
    fn read(bytes: &[u8]) -> Table {
        Table {
            pad: u32_at(bytes, 0),
            flags: u16_at(bytes, 4),
            depth: u16_at(bytes, 6),
            entries: u64_at(bytes, 32),
            root: u64_at(bytes, 40),
        }
    }
}

/// A node of a page.
struct Node<'a> {
    flags: u16,
    key: &'a [u8],
    /// Bytes of the data.
    size: usize,
    /// What lies in the page: the data, or the number of the page where it begins.
    here: &'a [u8],
}

/// The data of a leaf's node.
enum Data<'a> {
    Bytes(&'a [u8]),
    Table(Table),
}

struct Walk<'a> {
    bytes: &'a [u8],
    last: u64,
    used: Vec<bool>,
}

type Visit<'v, 'a> = dyn FnMut(&mut Walk<'a>, &Node<'a>) -> Verdict<()> + 'v;

impl<'a> Walk<'a> {
    fn use_page(&mut self, number: u64) -> Verdict<()> {
        if number < 2 || number > self.last {
            return Err(format!("page {number} is outside"));
        }
        let used = &mut self.used[number as usize];
        if *used {
            return Err(format!("page {number} is used twice"));
        }
        *used = true;
        Ok(())
    }

    fn page(&mut self, number: u64) -> Verdict<&'a [u8]> {
        self.use_page(number)?;
        let at = number as usize * PAGE;
        let page =
            self.bytes.get(at..at + PAGE).ok_or_else(|| format!("page {number} is missing"))?;
        if u64_at(page, 0) != number {
            return Err(format!("page {number} says it is {}", u64_at(page, 0)));
        }
        Ok(page)
    }

    /// Walks a table and calls `visit` for each entry.
    fn table(&mut self, table: &Table, visit: &mut Visit<'_, 'a>) -> Verdict<()> {
        let is_free_list = table.pad as usize == PAGE;
        // The free list has integer keys (8) and carries the flags of the environment.
        if !is_free_list && table.flags & 0x7fff != 0 {
            return Err(format!("a table has the flags {:#x}", table.flags));
        }
        if table.depth > MAX_DEPTH || (table.depth == 0) != (table.root == NO_PAGE) {
            return Err(format!("a table has the depth {}", table.depth));
        }
        let mut entries = 0;
        if table.root != NO_PAGE {
            self.tree(table.root, table.depth, &mut entries, visit)?;
        }
        if entries != table.entries {
            return Err(format!("a table has {entries} entries and says {}", table.entries));
        }
        Ok(())
    }

    /// `level` is 1 for leaves.
    fn tree(
        &mut self,
        number: u64,
        level: u16,
        entries: &mut u64,
        visit: &mut Visit<'_, 'a>,
    ) -> Verdict<()> {
        let page = self.page(number)?;
        let leaf = level == 1;
        if u16_at(page, 10) != if leaf { LEAF } else { BRANCH } {
            return Err(format!("page {number} has the flags {:#x}", u16_at(page, 10)));
        }
        for node in nodes(page, leaf).map_err(|what| format!("page {number}: {what}"))? {
            if leaf {
                *entries += 1;
                visit(self, &node)?;
            } else {
                let child = node.size as u64 | u64::from(node.flags) << 32;
                self.tree(child, level - 1, entries, visit)?;
            }
        }
        Ok(())
    }

    fn data(&mut self, node: &Node<'a>) -> Verdict<Data<'a>> {
        match node.flags {
            0 => Ok(Data::Bytes(node.here)),
            SUB_TABLE if node.size == 48 => Ok(Data::Table(Table::read(node.here))),
            BIG => {
                let first = u64_at(node.here, 0);
                let page = self.page(first)?;
                let pages = u64::from(u32_at(page, 12));
                let whole = PAGE_HEADER + node.size;
                if u16_at(page, 10) != OVERFLOW || pages != whole.div_ceil(PAGE) as u64 {
                    return Err(format!("page {first} holds no value of {} bytes", node.size));
                }
                for more in 1..pages {
                    self.use_page(first + more)?;
                }
                let at = first as usize * PAGE;
                let data = self.bytes.get(at + PAGE_HEADER..at + whole);
                data.map(Data::Bytes)
                    .ok_or_else(|| format!("the value in page {first} is cut short"))
            }
            flags => Err(format!("an entry has the flags {flags:#x}")),
        }
    }
}

/// The nodes of a page, which must fill it from its upper bound to its end without gap or overlap.
fn nodes(page: &[u8], leaf: bool) -> Verdict<Vec<Node<'_>>> {
    let (lower, upper) = (usize::from(u16_at(page, 12)), usize::from(u16_at(page, 14)));
    if lower < PAGE_HEADER + 2 || lower % 2 != 0 || lower > upper || upper > PAGE {
        return Err(format!("its bounds are {lower} and {upper}"));
    }
    let mut nodes = Vec::with_capacity((lower - PAGE_HEADER) / 2);
    let mut extents = Vec::with_capacity(nodes.capacity());
    for pointer in (PAGE_HEADER..lower).step_by(2) {
        let at = usize::from(u16_at(page, pointer));
        if at < upper || at % 2 != 0 || at + NODE_HEADER > PAGE {
            return Err(format!("a node lies at {at}"));
        }
        let (flags, key_size) = (u16_at(page, at + 4), usize::from(u16_at(page, at + 6)));
        let size = u32_at(page, at) as usize;
        let here_size = match (leaf, flags & BIG) {
            (false, _) => 0,
            (true, 0) => size,
            (true, _) => 8,
        };
        // The first key of a branch page may be empty.
        if key_size > MAX_KEY || (leaf && key_size == 0) {
            return Err(format!("a key has {key_size} bytes"));
        }
        let key_at = at + NODE_HEADER;
        let end = (key_at + key_size).saturating_add(here_size);
        let node =
            page.get(key_at..end).ok_or_else(|| format!("the node at {at} reaches outside"))?;
        let (key, here) = node.split_at(key_size);
        nodes.push(Node { flags, key, size, here });
        extents.push((at, end.next_multiple_of(2)));
    }
    extents.sort_unstable();
    let end = extents.iter().try_fold(upper, |at, (from, to)| (*from == at).then_some(*to));
    if end != Some(PAGE) {
        return Err("its nodes do not fill it".into());
    }
    Ok(nodes)
}

// The callers hold slices that are long enough.
fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
