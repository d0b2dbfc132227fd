package checkpoint

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc/codes"

	"berth/checkpoint/process/archive"
	"berth/integration/harness"
)

// confined returns a checkpoint of a confined container.
func confined(t *testing.T, d *harness.Daemon) *saved {
	t.Helper()
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script(counting), confinedConfig)
	waitCounted(t, c, 1)
	s := save(t, pod, c)
	pod.Remove(t)
	return s
}

// edited changes the manifest of a checkpoint, and signs it with the node's key.
func (s *saved) edited(t *testing.T, change func(*archive.Manifest)) {
	t.Helper()
	dir := harness.Get(os.Open(s.request.CheckpointPath))(t)
	defer dir.Close() // it was only read
	key := harness.Get(archive.ReadKey(s.d.Root))(t)
	a := harness.Get(archive.ReadManifest(dir, key))(t)
	change(&a.Manifest)
	for _, name := range []string{archive.ManifestFile, archive.PodOptionsFile, archive.PodDumpFile} { // Seal writes them
		harness.Must(t, os.Remove(filepath.Join(s.request.CheckpointPath, name)))
	}
	harness.Must(t, archive.Seal(t.Context(), dir, &a.Manifest, key, nil, false))
}

// imageNames returns the tags and digests of the daemon's images by ID.
func imageNames(t *testing.T, d *harness.Daemon) string {
	t.Helper()
	names := map[string][][]string{}
	for _, image := range harness.Get(d.Images.ListImages(t.Context(), nil))(t) {
		names[image.Id] = [][]string{image.RepoTags, image.RepoDigests}
	}
	return string(harness.Get(json.Marshal(names))(t))
}

// CVE-2026-50195: names in a checkpoint gave another image's tag to the checkpoint's image, or
// pulled one. berth neither tags nor pulls, whatever the checkpoint says.
func TestCVE_2026_50195_RestoreRetagsAnImage(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithCRIU(t))
	s := confined(t, d)
	before := imageNames(t, d)
	for name, change := range map[string]func(*archive.Image){
		"tag of another image": func(i *archive.Image) { i.Name = "registry.test/victim:latest" },
		"image that is not here": func(i *archive.Image) {
			i.Name, i.Ref = "127.0.0.1:1/victim:latest", "127.0.0.1:1/victim@sha256:"+fmt.Sprintf("%064d", 1)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s.edited(t, func(m *archive.Manifest) { change(&m.Containers[0].Image) })
			restored, containers := restorePod(t, d, s.identity(t))
			harness.Equal(t, "image of the container", containers[0].Status(t).Image.Image, containers[0].Config.Image.Image)
			restored.Remove(t)
			harness.Equal(t, "images", imageNames(t, d), before)
		})
	}
	t.Run("another image's ID", func(t *testing.T) {
		s.edited(t, func(m *archive.Manifest) { m.Containers[0].Image.ID = "sha256:" + fmt.Sprintf("%064d", 1) })
		restoreRefused(t, d, s.identity(t), codes.FailedPrecondition, "image")
		harness.Equal(t, "images", imageNames(t, d), before)
	})
}

// CVE-2026-53489: a checkpoint contained the container's log as a symlink, which the restore
// followed to a file of the node.
func TestCVE_2026_53489_LogOfACheckpointIsASymlink(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithCRIU(t))
	s := confined(t, d)
	victim := filepath.Join(d.Dir, "victim")
	harness.Must(t, os.WriteFile(victim, []byte("secret\n"), 0o600))
	defer func() { harness.Must(t, os.Remove(victim)) }()
	container := filepath.Join(s.request.CheckpointPath, s.request.ContainerConfigs[0].Metadata.Name)
	for _, name := range []string{"container.log", "checkpoint/container.log", archive.RootfsDiffFile} {
		t.Run(name, func(t *testing.T) {
			link := filepath.Join(container, name)
			if err := os.Rename(link, link+".kept"); err == nil {
				defer func() { harness.Must(t, os.Rename(link+".kept", link)) }()
			}
			harness.Must(t, os.Symlink(victim, link))
			defer func() { harness.Must(t, os.Remove(link)) }()
			restoreRefused(t, d, s.identity(t), codes.InvalidArgument, name)
			harness.Equal(t, "the node's file", string(harness.Get(os.ReadFile(victim))(t)), "secret\n")
		})
	}
}
