package integration

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/vbatts/tar-split/tar/asm"
	"github.com/vbatts/tar-split/tar/storage"
	bolt "go.etcd.io/bbolt"

	"berth/integration/fixture"
	"berth/integration/harness"
)

func writeBelow(t *testing.T, dir, name string, data []byte) {
	t.Helper()
	path := filepath.Join(dir, name)
	harness.Must(t, os.MkdirAll(filepath.Dir(path), 0o755))
	harness.Must(t, os.WriteFile(path, data, 0o600))
}

// containerdStore writes an image into a directory as containerd does.
func containerdStore(t *testing.T, names []string, img v1.Image) (dir string) {
	t.Helper()
	dir = t.TempDir()
	blob := func(h v1.Hash, data []byte) {
		writeBelow(t, dir, "io.containerd.content.v1.content/blobs/sha256/"+h.Hex, data)
	}
	for _, l := range harness.Get(img.Layers())(t) {
		blob(harness.Get(l.Digest())(t), harness.Get(io.ReadAll(harness.Get(l.Compressed())(t)))(t))
	}
	blob(harness.Get(img.ConfigName())(t), harness.Get(img.RawConfigFile())(t))
	manifest := harness.Get(img.RawManifest())(t)
	blob(harness.Get(img.Digest())(t), manifest)
	path := filepath.Join(dir, "io.containerd.metadata.v1.bolt/meta.db")
	harness.Must(t, os.MkdirAll(filepath.Dir(path), 0o755))
	db := harness.Get(bolt.Open(path, 0o600, nil))(t)
	defer func() { harness.Must(t, db.Close()) }()
	harness.Must(t, db.Update(func(tx *bolt.Tx) error {
		for _, name := range names {
			b := harness.Get(tx.CreateBucketIfNotExists([]byte("v1")))(t)
			for _, part := range []string{"k8s.io", "images", name, "target"} {
				b = harness.Get(b.CreateBucketIfNotExists([]byte(part)))(t)
			}
			harness.Must(t, b.Put([]byte("digest"), []byte(harness.DigestOf(t, img))))
			harness.Must(t, b.Put([]byte("size"), binary.AppendVarint(nil, int64(len(manifest)))))
		}
		return nil
	}))
	return dir
}

// crioStore writes an image into a directory as containers/storage does with the overlay driver.
func crioStore(t *testing.T, name string, img v1.Image) (dir string) {
	t.Helper()
	dir = t.TempDir()
	asJSON := func(path string, v any) { writeBelow(t, dir, path, harness.Get(json.Marshal(v))(t)) }
	var layers []map[string]any
	parent := ""
	for i, l := range harness.Get(img.Layers())(t) {
		data := harness.Get(io.ReadAll(harness.Get(l.Uncompressed())(t)))(t)
		id := fmt.Sprintf("layer%d", i)
		layers = append(layers, map[string]any{"id": id, "parent": parent, "diff-digest": harness.Get(l.DiffID())(t).String(), "diff-size": len(data)})
		parent = id
		var headers bytes.Buffer
		packed := gzip.NewWriter(&headers)
		in, done, err := asm.NewInputTarStreamWithDone(bytes.NewReader(data), storage.NewJSONPacker(packed), storage.NewDiscardFilePutter())
		harness.Must(t, err)
		harness.Get(io.Copy(io.Discard, in))(t)
		harness.Must(t, in.Close())
		harness.Must(t, <-done)
		harness.Must(t, packed.Close())
		writeBelow(t, dir, "overlay-layers/"+id+".tar-split.gz", headers.Bytes())
		files := filepath.Join(dir, "overlay", id, "diff")
		harness.Must(t, os.MkdirAll(files, 0o755))
		unpack := exec.Command("tar", "-x", "-C", files)
		unpack.Stdin = bytes.NewReader(data)
		if out, err := unpack.CombinedOutput(); err != nil {
			t.Fatalf("tar: %v\n%s", err, out)
		}
	}
	id := harness.Get(img.ConfigName())(t)
	asJSON("overlay-layers/layers.json", layers)
	asJSON("overlay-images/images.json", []map[string]any{{"id": id.Hex, "names": []string{name}, "layer": parent}})
	key := "=" + base64.StdEncoding.EncodeToString([]byte(id.String()))
	writeBelow(t, dir, "overlay-images/"+id.Hex+"/"+key, harness.Get(img.RawConfigFile())(t))
	return dir
}

// Images on the disk of another runtime keep their IDs and names, and the disk is unchanged.
func TestImageImport(t *testing.T) {
	d := harness.StartDaemon(t)
	for from, store := range map[string]func(string, v1.Image) string{
		"containerd": func(name string, img v1.Image) string {
			return containerdStore(t, []string{name, harness.Repository(name) + "@" + harness.DigestOf(t, img), harness.Get(img.ConfigName())(t).String()}, img)
		},
		"crio": func(name string, img v1.Image) string { return crioStore(t, name, img) },
	} {
		t.Run(from, func(t *testing.T) {
			name := "example.com/" + from + ":v1"
			img := harness.BuildImage(t, v1.Config{Env: []string{"PATH=/bin", "FROM=" + from}}, fixture.Tree{
				fixture.Dir("dir", 0o755), fixture.File("dir/file", 0o644, from+"\n"),
			})
			dir := store(name, img)
			before := harness.Get(exec.Command("sh", "-c", "find "+dir+" -printf '%p %m %s %T@\n'").Output())(t)
			harness.WantText(t, "output of import", runBerth(t, d, "image", "import", "--from", from, "--root", dir), harness.Get(img.ConfigName())(t).String())
			after := harness.Get(exec.Command("sh", "-c", "find "+dir+" -printf '%p %m %s %T@\n'").Output())(t)
			harness.Equal(t, "files of the other runtime", string(after), string(before))
			status := d.ImageStatus(t, name)
			harness.Equal(t, "tags", fmt.Sprint(status.RepoTags), "["+name+"]")
			if from == "containerd" {
				harness.Equal(t, "digests", fmt.Sprint(status.RepoDigests), "["+harness.Repository(name)+"@"+harness.DigestOf(t, img)+"]")
			}
			harness.Equal(t, "content", d.RunPod(t, harness.HostNetwork).Sh(t, "cat dir/file", harness.Image(name)), from+"\n")
			if out, err := tryBerth(d, "image", "import", "--from", from, "--root", dir, "example.com/other:v1"); err == nil {
				t.Errorf("import of an unknown name succeeded: %s", out)
			}
		})
	}
}

// skopeo copies images to containers/storage, the library with which CRI-O stores images. CRI-O
// itself is in no package source of these tests.
func TestImageImportFromContainersStorage(t *testing.T) {
	skopeo, err := exec.LookPath("skopeo")
	if err != nil {
		t.Skip("NOT TESTED: skopeo is not installed")
	}
	d := harness.StartDaemon(t)
	img := harness.BuildImage(t, v1.Config{Env: []string{"PATH=/bin"}}, fixture.Tree{
		fixture.Dir("dir", 0o755), fixture.File("dir/file", 0o644, "lower\n"), fixture.File("dir/hidden", 0o644, "hidden\n"),
		fixture.Dir("old", 0o755), fixture.File("old/file", 0o644, "old\n"), fixture.File("owned", 0o640, "owned\n").Owned(1000, 2000),
	}, fixture.Tree{
		fixture.File("dir/file", 0o644, "upper\n"), fixture.Hardlink("dir/link", "dir/file"), fixture.Symlink("dir/symlink", "/dir/file"),
		fixture.Whiteout("dir/", "hidden"), fixture.Dir("old", 0o755), fixture.Opaque("old/"), fixture.File("old/new", 0o644, "new\n"),
	})
	name := harness.Get(harness.Registry.Push("storage/app:v1", img))(t)
	dir := harness.Get(os.MkdirTemp("/var/tmp", "berth-storage-"))(t) // on a disk, because CRI-O's is
	t.Cleanup(func() { harness.Must(t, os.RemoveAll(dir)) })
	t.Cleanup(func() { harness.Must(t, syscall.Unmount(dir+"/root/overlay", 0)) }) // a mount that the library leaves
	copyImage := exec.Command(skopeo, "copy", "--insecure-policy", "--src-tls-verify=false",
		"docker://"+name, "containers-storage:[overlay@"+dir+"/root+"+dir+"/run]example.com/app:v1")
	if out, err := copyImage.CombinedOutput(); err != nil {
		t.Fatalf("skopeo: %v\n%s", err, out)
	}
	id := harness.Get(img.ConfigName())(t).String()
	harness.WantText(t, "output of import", runBerth(t, d, "image", "import", "--from", "crio", "--root", dir+"/root"), id)
	status := d.ImageStatus(t, "example.com/app:v1")
	harness.Equal(t, "ID", status.Id, id)
	const script = `cat dir/file dir/link dir/symlink; ls dir old; stat -c '%n %a %u:%g' owned; stat -c '%n %h' dir/link`
	const want = "upper\nupper\nupper\ndir:\nfile\nlink\nsymlink\n\nold:\nnew\nowned 640 1000:2000\ndir/link 2\n"
	harness.Equal(t, "content", d.RunPod(t, harness.HostNetwork).Sh(t, script, harness.Image("example.com/app:v1")), want)
}
