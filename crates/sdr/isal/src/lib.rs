//! Intel's ISA-L as a backend of `unbroken-erasure`: loaded at run time where it is installed
//! (Debian: `libisal2`), needed by nothing.
//!
//! ISA-L multiplies in the same field, so it makes the same bytes; [`IsaL::load`] tries all
//! products before it believes that.
//!
//! Failure cases: no such library, one without the functions, or one whose products differ: a
//! [`LoadError`] says which. Nothing fails later.

use std::ffi::c_int;

use libloading::Library;
use unbroken_erasure::{check_shapes, Backend, Kernel, MAX_DATA};

/// `void ec_init_tables(int k, int rows, unsigned char *a, unsigned char *g_tbls)`: what
/// `ec_encode_data` multiplies by, 32 bytes a coefficient.
type InitTables = unsafe extern "C" fn(c_int, c_int, *const u8, *mut u8);
/// `void ec_encode_data(int len, int k, int rows, unsigned char *g_tbls, unsigned char **data,
/// unsigned char **coding)`.
type EncodeData =
    unsafe extern "C" fn(c_int, c_int, c_int, *const u8, *const *const u8, *const *mut u8);

/// The library's name: its second ABI, which Debian has and ISA-L 2.31 still is.
const LIBRARY: &str = "libisal.so.2";
/// Bytes of a coefficient's tables.
const TABLES: usize = 32;
/// Outputs that are made by one call; their tables lie on the stack.
const ROWS: usize = 8;
/// The longest piece of a chunk that is given at once; ISA-L counts in `int`.
const PIECE: usize = 1 << 30;

/// Why ISA-L cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// It is not there, or has not the functions.
    #[error("ISA-L cannot be loaded ({0}); on Debian: apt-get install libisal2")]
    Library(#[from] libloading::Error),
    /// It computes something else.
    #[error(
        "{LIBRARY} multiplies {0} by all bytes to other products than GF(2^8) with 0x11d has: it \
         is not used"
    )]
    Products(u8),
}

/// ISA-L, loaded.
pub struct IsaL {
    init_tables: InitTables,
    encode_data: EncodeData,
    /// Stays loaded as long as the functions are used.
    _library: Library,
}

/// Coefficients in ISA-L's form, for more than one call.
pub struct Tables {
    bytes: Vec<u8>,
    inputs: usize,
    outputs: usize,
}

impl IsaL {
    /// Loads it, and compares all its products with ours.
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn load() -> Result<IsaL, LoadError> {
        IsaL::load_from(LIBRARY)
    }

    /// Loads ISA-L from a library of another name or at a path, and compares all its products with
    /// ours.
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn load_from(library: &str) -> Result<IsaL, LoadError> {
        // SAFETY: the initialisers of ISA-L only look at the processor.
        let library = unsafe { Library::new(library) }?;
        // SAFETY: the types are those of ISA-L's erasure_code.h, which its ABI 2 keeps.
        let (init_tables, encode_data) = unsafe {
            (
                *library.get::<InitTables>(b"ec_init_tables\0")?,
                *library.get::<EncodeData>(b"ec_encode_data\0")?,
            )
        };
        let isal = IsaL { init_tables, encode_data, _library: library };
        let all: [u8; 256] = std::array::from_fn(|i| i as u8);
        for factor in 0..=255 {
            let (mut its, mut ours) = ([0; 256], [0; 256]);
            isal.combine(&[factor], &[&all], &mut [&mut its]);
            Kernel::best().combine(&[factor], &[&all], &mut [&mut ours]);
            if its != ours {
                return Err(LoadError::Products(factor));
            }
        }
        Ok(isal)
    }

    /// Brings coefficients into ISA-L's form: for each output as many as there are inputs.
    ///
    /// # Panics
    /// Where they are not a multiple of the inputs, which are 1 to [`MAX_DATA`].
    pub fn tables(&self, coefficients: &[u8], inputs: usize) -> Tables {
        assert!(
            (1..=MAX_DATA).contains(&inputs)
                && coefficients.len().is_multiple_of(inputs)
                && coefficients.len() < PIECE
        );
        let outputs = coefficients.len() / inputs;
        let mut bytes = vec![0; TABLES * coefficients.len()];
        // SAFETY: there are inputs times outputs coefficients, and room for the tables of all.
        unsafe {
            (self.init_tables)(
                inputs as c_int,
                outputs as c_int,
                coefficients.as_ptr(),
                bytes.as_mut_ptr(),
            );
        }
        Tables { bytes, inputs, outputs }
    }

    /// [`Backend::combine`] with coefficients that are prepared: ISA-L's `ec_encode_data` and
    /// nothing else.
    ///
    /// # Panics
    /// Where slices differ in length or are not as many as the tables are for.
    pub fn combine_prepared(&self, tables: &Tables, inputs: &[&[u8]], outputs: &mut [&mut [u8]]) {
        assert_eq!((inputs.len(), outputs.len()), (tables.inputs, tables.outputs));
        let len = inputs[0].len();
        assert!(
            inputs.iter().all(|i| i.len() == len) && outputs.iter().all(|o| o.len() == len),
            "lengths differ"
        );
        for group in (0..outputs.len()).step_by(ROWS) {
            let end = outputs.len().min(group + ROWS);
            let tables =
                &tables.bytes[TABLES * tables.inputs * group..TABLES * tables.inputs * end];
            self.encode(tables, inputs, &mut outputs[group..end]);
        }
    }

    /// At most [`ROWS`] outputs, whose tables these are; all slices have the same length.
    fn encode(&self, tables: &[u8], inputs: &[&[u8]], outputs: &mut [&mut [u8]]) {
        debug_assert_eq!(tables.len(), TABLES * inputs.len() * outputs.len());
        let len = outputs.first().map_or(0, |o| o.len());
        for at in (0..len).step_by(PIECE) {
            let mut from = [std::ptr::null(); MAX_DATA];
            let mut to = [std::ptr::null_mut(); ROWS];
            from.iter_mut().zip(inputs).for_each(|(from, input)| *from = input[at..].as_ptr());
            to.iter_mut()
                .zip(&mut *outputs)
                .for_each(|(to, output)| *to = output[at..].as_mut_ptr());
            let (piece, k, rows) =
                (PIECE.min(len - at) as c_int, inputs.len() as c_int, outputs.len() as c_int);
            // SAFETY: `piece` bytes can be read at `k` places and written at `rows` others, and
            // there are tables for `k` times `rows`.
            unsafe {
                (self.encode_data)(piece, k, rows, tables.as_ptr(), from.as_ptr(), to.as_ptr())
            };
        }
    }
}

impl Backend for IsaL {
    fn name(&self) -> &'static str {
        "isa-l"
    }

    fn combine(&self, coefficients: &[u8], inputs: &[&[u8]], outputs: &mut [&mut [u8]]) {
        check_shapes(coefficients, inputs, outputs);
        if inputs.is_empty() {
            return outputs.iter_mut().for_each(|output| output.fill(0));
        }
        for (rows, outputs) in
            coefficients.chunks(ROWS * inputs.len()).zip(outputs.chunks_mut(ROWS))
        {
            let mut tables = [0; TABLES * MAX_DATA * ROWS];
            let tables = &mut tables[..TABLES * rows.len()];
            // SAFETY: there are inputs times outputs coefficients, and room for the tables of all.
            unsafe {
                (self.init_tables)(
                    inputs.len() as c_int,
                    outputs.len() as c_int,
                    rows.as_ptr(),
                    tables.as_mut_ptr(),
                );
            }
            self.encode(tables, inputs, outputs);
        }
    }
}
