package archive

import (
	"bytes"
	"crypto/hmac"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strings"
	"time"

	"berth/internal/errdefs"
)

// Version is the version of the manifests that Seal writes. Import refuses newer ones.
const Version = 1

// Manifest describes an archive. The writer fills every field except Version and Files.
type Manifest struct {
	Version    int         `json:"version"`
	CreatedAt  time.Time   `json:"createdAt"`     // when all containers were frozen
	Pod        *Pod        `json:"pod,omitempty"` // nil: an archive of one container
	Containers []Container `json:"containers"`    // sorted by name
	Node       Node        `json:"node"`
	Runtime    string      `json:"runtime,omitempty"` // version of the runtime that saved the pod's sandbox; empty: CRIU saved the images
	Files      []File      `json:"files"`             // all files but the manifest, sorted by path
}

// Pod identifies the pod of an archive.
type Pod struct {
	ID        string          `json:"id"`
	Name      string          `json:"name"`
	Namespace string          `json:"namespace"`
	UID       string          `json:"uid"`
	Attempt   uint32          `json:"attempt"`
	Handler   string          `json:"handler"`
	IPs       []netip.Addr    `json:"ips,omitempty"` // none with the node's network
	Config    json.RawMessage `json:"config"`        // PodSandboxConfig of the CRI, as protojson
}

// Container describes a container of an archive.
type Container struct {
	Name    string          `json:"name"` // of the CRI's ContainerMetadata; the directory in an archive of a pod
	ID      string          `json:"id"`
	Attempt uint32          `json:"attempt"`
	Image   Image           `json:"image"`
	Config  json.RawMessage `json:"config"` // ContainerConfig of the CRI, as protojson
}

// Image identifies the image of a container.
type Image struct {
	Name   string  `json:"name"` // as the client named it
	Ref    string  `json:"ref"`  // repository@digest
	ID     string  `json:"id"`   // digest of its config
	Layers []Layer `json:"layers"`
}

// Layer identifies a layer of an image by two digests.
type Layer struct {
	Blob   string `json:"blob"`
	DiffID string `json:"diffID"`
}

// Node describes the node that wrote an archive.
type Node struct {
	Berth        string   `json:"berth"`  // version of berth
	CRIU         int      `json:"criu"`   // as CRIU's RPC gives it: 40101 is 4.1.1
	Kernel       string   `json:"kernel"` // uname -r
	Architecture string   `json:"architecture"`
	CPUFeatures  []string `json:"cpuFeatures"` // flags of /proc/cpuinfo, sorted
}

// File is a file of an archive.
type File struct {
	Path   string `json:"path"`   // relative to the archive
	Size   int64  `json:"size"`   // bytes
	SHA256 string `json:"sha256"` // lower-case hex
}

// Dir returns the directory of a container in the archive: "." in an archive of one container.
func (m *Manifest) Dir(c *Container) string {
	if m.Pod == nil {
		return "."
	}
	return c.Name
}

// envelope is the content of the manifest's file. The HMAC covers the bytes of Manifest.
type envelope struct {
	Manifest json.RawMessage `json:"manifest"`
	Key      string          `json:"key"`  // Key.ID
	HMAC     string          `json:"hmac"` // lower-case hex
}

// Limits of manifests.
const (
	maxManifest   = 32 << 20 // bytes
	maxFiles      = 1 << 16
	maxContainers = 1000
	maxDepth      = 64      // nesting of JSON
	maxValues     = 1 << 19 // JSON values: three for each file, and the values in the configs
)

// encode returns the manifest's file.
func (m *Manifest) encode(key *Key) ([]byte, error) {
	body, err := json.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode manifest: %w", err)
	}
	data, err := json.Marshal(envelope{body, key.ID(), hex.EncodeToString(key.sum(body))})
	if err != nil {
		return nil, fmt.Errorf("encode manifest: %w", err)
	}
	if len(data) > maxManifest {
		return nil, errdefs.FailedPrecondition("checkpoint: the manifest has %d bytes, more than %d", len(data), maxManifest)
	}
	return append(data, '\n'), nil
}

// decodeManifest decodes the manifest's file strictly. If this node's key has made the HMAC, and it
// is wrong, the error is InvalidArgument.
func decodeManifest(data []byte, key *Key) (*Manifest, Signer, error) {
	var e envelope
	if err := decodeStrict(data, &e); err != nil {
		return nil, OtherNode, errdefs.InvalidArgument("checkpoint: %s: %w", ManifestFile, err)
	}
	signer := OtherNode
	if key != nil && e.Key == key.ID() {
		sum, err := hex.DecodeString(e.HMAC)
		if err != nil || !hmac.Equal(sum, key.sum(e.Manifest)) {
			return nil, OtherNode, errdefs.InvalidArgument("checkpoint: %s: wrong signature: the manifest was changed", ManifestFile)
		}
		signer = ThisNode
	}
	var version struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(e.Manifest, &version); err != nil {
		return nil, OtherNode, errdefs.InvalidArgument("checkpoint: %s: %w", ManifestFile, err)
	}
	if version.Version != Version {
		return nil, OtherNode, errdefs.FailedPrecondition("checkpoint: %s has version %d; this berth reads version %d",
			ManifestFile, version.Version, Version)
	}
	m, err := decodeBody(e.Manifest)
	if err != nil {
		return nil, OtherNode, errdefs.InvalidArgument("checkpoint: %s: %w", ManifestFile, err)
	}
	if err := m.check(); err != nil {
		return nil, OtherNode, errdefs.InvalidArgument("checkpoint: %s: %w", ManifestFile, err)
	}
	return m, signer, nil
}

// check returns an error unless the names of containers and files form an archive.
func (m *Manifest) check() error {
	if n := len(m.Containers); n == 0 || n > maxContainers || m.Pod == nil && n != 1 {
		return fmt.Errorf("%d containers", n)
	}
	if len(m.Files) > maxFiles {
		return fmt.Errorf("more than %d files", maxFiles)
	}
	dirs := map[string]bool{}
	for i := range m.Containers {
		c := &m.Containers[i]
		if m.Pod != nil {
			if err := CheckName(c.Name); err != nil {
				return err
			}
		}
		dir := strings.TrimPrefix(m.Dir(c), ".")
		if dirs[dir] {
			return fmt.Errorf("two containers %q", c.Name)
		}
		dirs[dir] = true
	}
	if m.Runtime != "" && len(m.Containers) != 1 {
		return fmt.Errorf("%d containers in the images of a sandbox", len(m.Containers))
	}
	return m.checkFiles(dirs)
}

// checkFiles checks the list of files. dirs are the directories of the containers.
func (m *Manifest) checkFiles(dirs map[string]bool) error {
	have := make(map[string]bool, len(m.Files))
	for _, f := range m.Files {
		k, dir := classify(f.Path, m.Pod != nil)
		if k == unknown || k != ofPod && !dirs[dir] {
			return fmt.Errorf("unexpected file %q", errdefs.Clip(f.Path))
		}
		if have[f.Path] {
			return fmt.Errorf("file %q twice", f.Path)
		}
		have[f.Path] = true
		if sum, err := hex.DecodeString(f.SHA256); err != nil || len(sum) != 32 || f.Size < 0 {
			return fmt.Errorf("file %q has no valid size and SHA-256", f.Path)
		}
	}
	required := []string{ConfigFile, SpecFile}
	if m.Runtime == "" {
		required = append(required, path.Join(ImagesDir, "inventory.img"), path.Join(ImagesDir, DescriptorsFile))
	} else {
		required = append(required, path.Join(ImagesDir, SandboxFile))
	}
	for dir := range dirs {
		for _, name := range required {
			if !have[path.Join(dir, name)] {
				return fmt.Errorf("file %q is missing", path.Join(dir, name))
			}
		}
	}
	return nil
}

// decodeBody decodes a manifest. It decodes the containers only after it has counted them, because
// an empty one takes much memory.
func decodeBody(data []byte) (*Manifest, error) {
	m := new(Manifest)
	body := struct {
		*Manifest
		Containers []json.RawMessage `json:"containers"`
	}{Manifest: m}
	if err := decodeStrict(data, &body); err != nil {
		return nil, err
	}
	if len(body.Containers) > maxContainers {
		return nil, fmt.Errorf("more than %d containers", maxContainers)
	}
	m.Containers = make([]Container, len(body.Containers))
	for i, data := range body.Containers {
		if err := decodeStrict(data, &m.Containers[i]); err != nil {
			return nil, fmt.Errorf("container %d: %w", i, err)
		}
	}
	return m, nil
}

// decodeStrict decodes one JSON document within the limits without unknown fields.
func decodeStrict(data []byte, into any) error {
	if err := checkShape(data); err != nil {
		return err
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return err
	}
	if d.More() {
		return errors.New("more than one document")
	}
	return nil
}

// checkShape returns an error if a JSON document nests deeper than maxDepth, or has more than
// maxValues values. Decoded values of a few bytes can take hundreds of bytes of memory.
func checkShape(data []byte) error {
	depth, values, quoted := 0, 0, false
	for i := 0; i < len(data); i++ {
		switch c := data[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '{' || c == '[':
			if depth++; depth > maxDepth {
				return fmt.Errorf("nested deeper than %d levels", maxDepth)
			}
			values++
		case c == '}' || c == ']':
			depth--
		case c == ',':
			values++
		}
		if values > maxValues {
			return fmt.Errorf("more than %d values", maxValues)
		}
	}
	return nil
}

// file returns the entry of a path.
func (m *Manifest) file(name string) (File, bool) {
	i, ok := slices.BinarySearchFunc(m.Files, name, func(f File, name string) int { return strings.Compare(f.Path, name) })
	if !ok {
		return File{}, false
	}
	return m.Files[i], true
}
