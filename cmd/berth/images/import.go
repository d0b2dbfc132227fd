package images

import (
	"archive/tar"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/spf13/cobra"
	bolt "go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"

	"berth/cmd/berth/cli"
	"berth/image/registry"
	"berth/server/admin"
)

// Default directories of other runtimes.
const (
	containerdRoot = "/var/lib/containerd"
	crioRoot       = "/var/lib/containers/storage"
)

func importCommand(o *connection) *cobra.Command {
	var from, root, namespace string
	var req admin.LoadRequest
	cmd := &cobra.Command{
		Use:   "import [NAME…]",
		Short: "Take over images from the disk of containerd or CRI-O",
		Args:  cobra.ArbitraryArgs,
		Long: `Take over images from the disk of containerd or CRI-O, without a registry. NAME limits the import
to images with these names, as the other runtime writes them. The command only reads the other
runtime's directory. containerd must not run. Images keep their IDs. Those from CRI-O have no
repository digests.`,
	}
	cmd.Flags().StringVar(&from, "from", "", "containerd or crio")
	cmd.Flags().StringVar(&root, "root", "", "the runtime's directory (default "+containerdRoot+" or "+crioRoot+")")
	cmd.Flags().StringVar(&namespace, "namespace", "k8s.io", "containerd's namespace")
	cmd.Flags().BoolVar(&req.Pin, "pin", false, "exclude the images from kubelet's garbage collection")
	cmd.RunE = o.connected(func(c *call) error {
		var found []source
		var err error
		switch from {
		case "containerd":
			found, err = containerdImages(cmp.Or(root, containerdRoot), namespace)
		case "crio":
			found, err = crioImages(cmp.Or(root, crioRoot))
		default:
			return errors.New("--from: want containerd or crio")
		}
		if err != nil {
			return err
		}
		return c.takeOver(found, req)
	})
	return cmd
}

// source is an image of another runtime.
type source struct {
	names []string
	write func(*tar.Writer) error // writes an archive with only this image
}

// takeOver sends images to the daemon. It continues after an error, which concerns one image.
func (c *call) takeOver(found []source, req admin.LoadRequest) error {
	failed, sent := 0, 0
	for _, img := range found {
		isNamed := func(name string) bool { return slices.Contains(img.names, name) }
		if len(c.args) > 0 && !slices.ContainsFunc(c.args, isNamed) {
			continue
		}
		sent++
		out, in := io.Pipe()
		done := make(chan struct{})
		go func() {
			defer close(done)
			w := tar.NewWriter(in)
			err := img.write(w)
			if err == nil {
				err = w.Close()
			}
			_ = in.CloseWithError(err) // it always returns nil
		}()
		err := c.send(fmt.Sprint(img.names), out, req)
		_ = out.Close() // ends the goroutine
		<-done
		if c.Context().Err() != nil {
			return err
		}
		if err != nil {
			failed++
			_, _ = fmt.Fprintln(c.ErrOrStderr(), "berth:", err)
		}
	}
	switch {
	case sent == 0:
		return errors.New("no such image in the other runtime's directory")
	case failed > 0:
		return &cli.ExitStatus{Code: 1, Cause: fmt.Errorf("%d of %d images were not imported", failed, sent)}
	}
	return nil
}

// openTimeout limits the wait for the lock of containerd's database.
const openTimeout = time.Second

// containerdImages lists the images in containerd's database. The content of an image is read
// later.
func containerdImages(root, namespace string) (found []source, err error) {
	path := filepath.Join(root, "io.containerd.metadata.v1.bolt", "meta.db")
	if _, err := os.Stat(path); err != nil {
		return nil, fmt.Errorf("containerd's database: %w", err)
	}
	db, err := bolt.Open(path, 0o600, &bolt.Options{ReadOnly: true, Timeout: openTimeout})
	if errors.Is(err, bolterrors.ErrTimeout) {
		return nil, fmt.Errorf("%s is in use: stop containerd first; its containers keep running", path)
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	byDigest := map[digest.Digest]int{}
	err = db.View(func(tx *bolt.Tx) error {
		images := tx.Bucket([]byte("v1"))
		for _, name := range []string{namespace, "images"} {
			if images != nil {
				images = images.Bucket([]byte(name))
			}
		}
		if images == nil {
			return fmt.Errorf("%s has no images in the namespace %s", path, namespace)
		}
		return images.ForEachBucket(func(name []byte) error {
			target := images.Bucket(name).Bucket([]byte("target"))
			if target == nil {
				return nil
			}
			d := digest.Digest(target.Get([]byte("digest")))
			if d.Validate() != nil {
				return nil
			}
			i, known := byDigest[d]
			if !known {
				i = len(found)
				byDigest[d] = i
				found = append(found, source{})
			}
			if !bytes.HasPrefix(name, []byte("sha256:")) { // an ID, for kubelet
				found[i].names = append(found[i].names, string(name))
			}
			return nil
		})
	})
	for d, i := range byDigest {
		found[i].write = func(w *tar.Writer) error {
			return writeContent(w, filepath.Join(root, "io.containerd.content.v1.content"), d, found[i].names)
		}
	}
	return found, err
}

// writeContent writes an OCI layout with the part of an image that is in containerd's content
// store.
func writeContent(w *tar.Writer, dir string, top digest.Digest, names []string) error {
	store, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer store.Close() // read only
	c := &content{store: store, out: w, written: map[digest.Digest]bool{}}
	size, err := c.write(top, registry.MaxIndexDepth+1)
	if err != nil {
		return err
	}
	if size < 0 {
		return fmt.Errorf("manifest %s is not in containerd's store", top)
	}
	return writeLayoutIndex(w, ocispec.Descriptor{Digest: top, Size: size}, names)
}

// content copies blobs of a content store to a tar, each one once.
type content struct {
	store   *os.Root
	out     *tar.Writer
	written map[digest.Digest]bool
}

// write copies a manifest or index, and everything that it names. A missing blob is left out,
// because the store contains only the node's platform. Its size is -1. The daemon refuses an image
// without its layers.
func (c *content) write(d digest.Digest, depth int) (size int64, err error) {
	f, size, err := c.open(d)
	if err != nil || size < 0 {
		return size, err
	}
	defer f.Close() // read only
	data, err := io.ReadAll(io.LimitReader(f, registry.MaxManifestSize))
	if err != nil {
		return 0, err
	}
	var doc struct {
		Config            *ocispec.Descriptor
		Manifests, Layers []ocispec.Descriptor
	}
	if err := errors.Join(registry.CheckValues(data), json.Unmarshal(data, &doc)); err != nil {
		return 0, fmt.Errorf("manifest %s: %w", d, err)
	}
	if depth > 0 {
		for _, m := range doc.Manifests {
			if _, err := c.write(m.Digest, depth-1); err != nil {
				return 0, err
			}
		}
	}
	if doc.Config != nil {
		doc.Layers = append(doc.Layers, *doc.Config)
	}
	for _, l := range doc.Layers {
		if err := c.copy(l.Digest); err != nil {
			return 0, err
		}
	}
	return size, c.put(d, bytes.NewReader(data), int64(len(data)))
}

func (c *content) copy(d digest.Digest) error {
	f, size, err := c.open(d)
	if err != nil || size < 0 {
		return err
	}
	defer f.Close() // read only
	return c.put(d, f, size)
}

// open opens a blob. The size of a missing blob is -1.
func (c *content) open(d digest.Digest) (*os.File, int64, error) {
	if err := d.Validate(); err != nil {
		return nil, 0, fmt.Errorf("digest %.100q: %w", d, err)
	}
	f, err := c.store.Open("blobs/" + d.Algorithm().String() + "/" + d.Encoded())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, -1, nil
	}
	if err != nil {
		return nil, 0, err
	}
	info, err := f.Stat()
	if err != nil {
		return nil, 0, errors.Join(err, f.Close())
	}
	return f, info.Size(), nil
}

func (c *content) put(d digest.Digest, from io.Reader, size int64) error {
	if c.written[d] {
		return nil
	}
	c.written[d] = true
	return writeFile(c.out, "blobs/"+d.Algorithm().String()+"/"+d.Encoded(), size, from)
}

// writeLayoutIndex writes the index of an OCI layout that names one image.
func writeLayoutIndex(w *tar.Writer, top ocispec.Descriptor, names []string) error {
	index := ocispec.Index{}
	index.SchemaVersion = 2
	if len(names) == 0 {
		index.Manifests = append(index.Manifests, top)
	}
	for _, name := range names {
		entry := top
		entry.Annotations = map[string]string{"io.containerd.image.name": name}
		index.Manifests = append(index.Manifests, entry)
	}
	return writeJSON(w, "index.json", index)
}

func writeJSON(w *tar.Writer, name string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return writeFile(w, name, int64(len(data)), bytes.NewReader(data))
}

func writeFile(w *tar.Writer, name string, size int64, from io.Reader) error {
	if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: size, Typeflag: tar.TypeReg}); err != nil {
		return err
	}
	n, err := io.Copy(w, from)
	if err == nil && n != size {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}
