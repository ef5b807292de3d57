//! Hugging Face directories: `config.json` and one or several safetensors files. Also models of nanochat, which have other files.

use crate::architecture::{Architecture, Instance, NANOCHAT_FULL, TensorNames};
use crate::config::{self, ModelConfig};
use crate::element::{Element, transpose};
use crate::entries::Entries;
use crate::nanochat_checkpoint;
use crate::safetensors_file;
use crate::tensor_file::{TensorFile, TensorInfo};
use anyhow::{Context, Result, bail, ensure};
use engine::tensor::DType;
use model::{Descriptor, Param};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};
use system::progress::{self, Unit};

/// Name of the only safetensors file.
pub const WEIGHTS: &str = "model.safetensors";
/// Name of the file that maps tensors to several safetensors files.
pub const INDEX: &str = "model.safetensors.index.json";

/// Bytes of two tensors that are compared at a time.
const CHUNK: usize = 1 << 20;

/// An open model. All tensors have been found, and their types and shapes checked; their data is still in the files.
#[derive(Debug)]
pub struct HuggingFaceModel {
    directory: PathBuf,
    config: ModelConfig,
    /// The names of the tensors in the files.
    names: &'static Architecture,
    /// Name of the file with the shape of the model.
    description: String,
    files: Vec<TensorFile>,
    /// The tensors, keyed by row of the architecture's table.
    tensors: HashMap<(usize, Instance), Located>,
}

/// A tensor in one of the files.
#[derive(Clone, Debug)]
struct Located {
    file: usize,
    name: String,
    info: TensorInfo,
}

impl HuggingFaceModel {
    /// Opens a directory, and checks its configuration and all tensors.
    pub fn open(directory: &Path) -> Result<Self> {
        let config = ModelConfig::read(directory)?;
        Self::of(directory, config.architecture, config, config::FILE.to_owned(), open_files(directory)?)
    }

    /// Opens the `model_STEP.pt` of a checkpoint of nanochat. Its configuration is that of an export.
    pub fn open_nanochat(path: &Path) -> Result<Self> {
        let (descriptor, file) = nanochat_checkpoint::open(path)?;
        let config = ModelConfig::new(Architecture::of(&descriptor)?, descriptor, [None; 2]);
        let description = nanochat_checkpoint::meta(path).unwrap_or_default();
        Self::of(atomic_file::parent(path), &NANOCHAT_FULL, config, description, vec![file])
    }

    fn of(
        directory: &Path,
        architecture: &'static Architecture,
        config: ModelConfig,
        description: String,
        files: Vec<TensorFile>,
    ) -> Result<Self> {
        let directory = directory.to_owned();
        let mut model = Self { directory, config, names: architecture, description, files, tensors: HashMap::new() };
        let mut found = model.all_tensors(architecture)?;
        for (row, names, instance) in architecture.all_tensors(&model.config.descriptor) {
            let name = instance.name(names.hugging_face);
            let shape = names.hugging_face_shape(&model.config.descriptor);
            let located = found.remove(&name).with_context(|| {
                format!(
                    "{}: tensor {}: expected {shape:?}, found none; {}{}",
                    model.weights(),
                    architecture.full_name(names, instance),
                    model.check_description(),
                    if names.param == Param::LmHead { ", and whether tie_word_embeddings should be true" } else { "" }
                )
            })?;
            model.check(&located, &shape)?;
            model.tensors.insert((row, instance), located);
        }
        match found.remove(architecture.head) {
            Some(head) => model.check_head(&head)?,
            None if !model.config.descriptor.tied => {}
            None => {
                model.config.check_tied().with_context(|| model.directory.join(config::FILE).display().to_string())?;
            }
        }
        let unexpected = found.into_iter().find(|(name, _)| !architecture.ignores(name));
        if let Some((_, Located { file, name, info })) = unexpected {
            bail!(
                "{}: tensor {name}: expected only the tensors of {} with {}, found {}, which llm-rs would ignore; {}",
                model.files[file].path().display(),
                architecture.class,
                model.config.descriptor,
                info.describe(),
                model.check_description()
            );
        }
        Ok(model)
    }

    /// Returns the advice of errors in which the tensors are not those of the shape.
    fn check_description(&self) -> String {
        format!("check that {} belongs to these weights", self.description)
    }

    /// Returns the names of all files.
    fn weights(&self) -> String {
        self.files.iter().map(|file| file.path().display().to_string()).collect::<Vec<_>>().join(", ")
    }

    /// Returns the tensors of all files by their names without the prefix of the class.
    fn all_tensors(&self, architecture: &Architecture) -> Result<BTreeMap<String, Located>> {
        let mut found = BTreeMap::new();
        for (file, opened) in self.files.iter().enumerate() {
            for (name, info) in opened.tensors() {
                let short = name.strip_prefix(architecture.prefix).unwrap_or(name);
                let located = Located { file, name: name.clone(), info: info.clone() };
                if let Some(other) = found.insert(short.to_owned(), located) {
                    bail!(
                        "{}: expected one tensor {short}, found {name} and, in {}, {}",
                        opened.path().display(),
                        self.files[other.file].path().display(),
                        other.name
                    );
                }
            }
        }
        Ok(found)
    }

    /// Checks the type and the shape of a tensor.
    fn check(&self, located: &Located, shape: &[usize]) -> Result<()> {
        let Located { file, name, info } = located;
        let same_shape = info.shape.len() == shape.len() && info.shape.iter().zip(shape).all(|(&a, &b)| a == b as u64);
        ensure!(
            same_shape && Element::named(&info.dtype).is_some(),
            "{}: tensor {name}: expected F32, BF16 or F16 {shape:?}, found {}; {}",
            self.files[*file].path().display(),
            info.describe(),
            if same_shape {
                "llm-rs reads no other type, so convert the file".to_owned()
            } else {
                self.check_description()
            }
        );
        Ok(())
    }

    /// Checks that the head has the values of the token embedding, because the engine has one tensor for both.
    fn check_head(&self, head: &Located) -> Result<()> {
        let embedding = self.tensor(Param::Wte, 0);
        let [a, b] = [embedding, head].map(|located| &located.info);
        let path = self.files[head.file].path().display();
        let advice = if self.names.parts_of(Param::LmHead).next().is_some() {
            "if the head is not tied, set tie_word_embeddings to false"
        } else {
            "llm-rs supports only tied embeddings of this architecture"
        };
        ensure!(
            a.dtype == b.dtype && a.shape == b.shape,
            "{path}: tensor {}: expected {} as {}, found {}; {advice}",
            head.name,
            a.describe(),
            embedding.name,
            b.describe()
        );
        let bytes = a.data_offsets.1 - a.data_offsets.0;
        let progress = progress::start("checking tied head", Unit::Bytes, bytes);
        let mut buffers = [vec![0; CHUNK], vec![0; CHUNK]];
        for start in (0..bytes).step_by(CHUNK) {
            let len = CHUNK.min((bytes - start) as usize);
            for (buffer, located) in buffers.iter_mut().zip([embedding, head]) {
                self.files[located.file].read(&located.info, start, &mut buffer[..len])?;
            }
            ensure!(
                buffers[0][..len] == buffers[1][..len],
                "{path}: tensor {}: expected the values of {}, found others; {advice}",
                head.name,
                embedding.name
            );
            progress.add(len as u64);
        }
        Ok(())
    }

    /// Returns the path of the directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns whether a file of the directory contains tensors of the model.
    pub fn has_file(&self, path: &Path) -> bool {
        self.files.iter().any(|file| file.path().file_name() == path.file_name())
    }

    /// Returns the first file with tensors.
    pub fn first_file(&self) -> &Path {
        self.files[0].path()
    }

    /// Returns the configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the shape of the model.
    pub fn descriptor(&self) -> Descriptor {
        self.config.descriptor
    }

    /// Returns the smallest storage type that holds all parameters exactly.
    pub fn dtype(&self) -> DType {
        let all_bf16 = self.tensors.values().all(|located| element(located).dtype() == DType::Bf16);
        if all_bf16 { DType::Bf16 } else { DType::F32 }
    }

    /// Returns the size of all tensors in bytes.
    pub fn bytes(&self) -> u64 {
        self.tensors.values().map(|Located { info, .. }| info.data_offsets.1 - info.data_offsets.0).sum()
    }

    /// Returns the first part of a tensor.
    fn tensor(&self, param: Param, layer: usize) -> &Located {
        let mut parts = self.names.parts_of(param);
        let (row, _) = parts.next().expect("the architecture has a row for each tensor of its models");
        &self.tensors[&(row, Instance { layer, expert: 0 })]
    }

    /// Reads a tensor, one row per output, without padding of the vocabulary. Returns the type and the bytes of its elements. NaN and
    /// infinite values are an error that names the tensor in the file.
    pub fn read(&self, param: Param, layer: usize) -> Result<(Element, Vec<u8>)> {
        self.read_experts(param, layer, 0..param.experts(&self.config.descriptor))
    }

    /// Reads the part of a tensor that belongs to some experts, like [`read`](Self::read). Other tensors belong to expert 0.
    pub fn read_experts(&self, param: Param, layer: usize, experts: Range<usize>) -> Result<(Element, Vec<u8>)> {
        let of_expert = |expert| {
            let parts = self.names.parts_of(param);
            parts.map(move |(row, names)| self.read_part(row, names, Instance { layer, expert }))
        };
        let parts = experts.flat_map(of_expert);
        let mut parts: Vec<(Element, Vec<u8>)> = parts.collect::<Result<_>>()?;
        if parts.windows(2).any(|pair| pair[0].0 != pair[1].0) {
            let widen = |(element, bytes): (Element, Vec<u8>)| (Element::F32, element.convert(bytes, DType::F32));
            parts = parts.into_iter().map(widen).collect();
        }
        let mut parts = parts.into_iter();
        let (element, mut bytes) = parts.next().expect("the architecture has a row for each tensor of its models");
        parts.for_each(|(_, part)| bytes.extend(part));
        Ok((element, bytes))
    }

    fn read_part(&self, row: usize, names: &TensorNames, instance: Instance) -> Result<(Element, Vec<u8>)> {
        let located = &self.tensors[&(row, instance)];
        let element = element(located);
        let mut bytes = vec![0; names.elements(&self.config.descriptor).len() * element.bytes()];
        self.files[located.file].read(&located.info, 0, &mut bytes)?;
        element.check_finite(&bytes, &located.name)?;
        if names.transposed {
            let rows = names.hugging_face_shape(&self.config.descriptor)[0];
            bytes = transpose(&bytes, rows, element.bytes());
        }
        self.names.convert_rotation(names, &self.config.descriptor, element.bytes(), &mut bytes);
        Ok((element, bytes))
    }
}

fn element(located: &Located) -> Element {
    Element::named(&located.info.dtype).expect("the type is checked when the directory is opened")
}

/// The contents of [`INDEX`].
#[derive(Deserialize)]
struct Index {
    weight_map: Entries<String>,
}

/// Opens all safetensors files of a directory. One file takes precedence over an index, as in transformers.
fn open_files(directory: &Path) -> Result<Vec<TensorFile>> {
    let single = directory.join(WEIGHTS);
    if single.exists() {
        return Ok(vec![safetensors_file::open(&single)?]);
    }
    let path = directory.join(INDEX);
    if !path.exists() {
        let pickled =
            ["pytorch_model.bin", "pytorch_model.bin.index.json"].iter().any(|name| directory.join(name).exists());
        bail!(
            "{}: expected {WEIGHTS} or {INDEX}, found {}",
            directory.display(),
            if pickled {
                "only pytorch_model.bin; load it with transformers and save it again with save_pretrained"
            } else {
                "neither"
            }
        );
    }
    let name = path.display();
    let text = bounded_file::read(&path, bounded_file::DESCRIPTION).with_context(|| format!("cannot read {name}"))?;
    let index: Index = serde_json::from_slice(&text).with_context(|| format!("{name}: not an index"))?;
    let weight_map = index.weight_map.distinct().with_context(|| format!("{name}: weight_map"))?;
    let names: BTreeSet<&String> = weight_map.values().collect();
    ensure!(!names.is_empty(), "{name}: expected at least one tensor in weight_map, found none");
    let mut files = Vec::new();
    for file in names {
        // The index must not make the program read files elsewhere.
        ensure!(
            Path::new(file).file_name().is_some_and(|plain| plain == file.as_str()),
            "{name}: expected file names in weight_map, found the path {file}"
        );
        let opened = safetensors_file::open(&directory.join(file))?;
        for tensor in opened.tensors().keys() {
            let listed = weight_map.get(tensor);
            ensure!(
                listed == Some(file),
                "{name}: expected tensor {tensor} in {file}, which contains it, found {}",
                listed.map_or("none", String::as_str)
            );
        }
        files.push(opened);
    }
    let contains = |file: &str, tensor: &str| {
        files.iter().any(|opened| opened.path().ends_with(file) && opened.tensors().contains_key(tensor))
    };
    if let Some((tensor, file)) = weight_map.iter().find(|(tensor, file)| !contains(file, tensor)) {
        bail!("{}: expected tensor {tensor}, which {INDEX} lists, found none", directory.join(file).display());
    }
    Ok(files)
}
