package checkpoint

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc/codes"

	"berth/checkpoint/archive"
	"berth/integration/harness"
)

// foreign returns a checkpoint of another node, and makes the daemon restore such checkpoints.
func foreign(t *testing.T, d *harness.Daemon) *saved {
	t.Helper()
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script(counting), confinedConfig)
	waitCounted(t, c, 1)
	s := save(t, pod, c)
	pod.Remove(t)
	allowForeign(t, d)
	return s
}

// allowForeign makes the daemon another node, which restores checkpoints of others.
func allowForeign(t *testing.T, d *harness.Daemon) {
	t.Helper()
	otherNode(t, d)
	d.Stop(t)
	criu := fmt.Sprintf("checkpoint.criu = %q", os.Getenv("BERTH_TEST_CRIU"))
	d.SetConfig(t, criu, criu+"\ncheckpoint.restore_foreign = true")
	d.Start(t)
}

// editManifest changes the manifest of a checkpoint. Its signature does not fit any more.
func (s *saved) editManifest(t *testing.T, change func(*archive.Manifest)) {
	t.Helper()
	path := filepath.Join(s.request.CheckpointPath, archive.ManifestFile)
	var envelope map[string]json.RawMessage
	harness.Must(t, json.Unmarshal(harness.Get(os.ReadFile(path))(t), &envelope))
	var manifest archive.Manifest
	harness.Must(t, json.Unmarshal(envelope["manifest"], &manifest))
	change(&manifest)
	envelope["manifest"] = harness.Get(json.Marshal(manifest))(t)
	harness.Must(t, os.WriteFile(path, harness.Get(json.Marshal(envelope))(t), 0o600))
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
	d := harness.StartDaemon(t, criuOption(t))
	s := foreign(t, d)
	before := imageNames(t, d)
	for name, change := range map[string]func(*archive.Image){
		"tag of another image": func(i *archive.Image) { i.Name = "registry.test/victim:latest" },
		"image that is not here": func(i *archive.Image) {
			i.Name, i.Ref = "127.0.0.1:1/victim:latest", "127.0.0.1:1/victim@sha256:"+fmt.Sprintf("%064d", 1)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s.editManifest(t, func(m *archive.Manifest) { change(&m.Containers[0].Image) })
			restored, containers := restorePod(t, d, s.identity(t))
			harness.Equal(t, "image of the container", containers[0].Status(t).Image.Image, containers[0].Config.Image.Image)
			restored.Remove(t)
			harness.Equal(t, "images", imageNames(t, d), before)
		})
	}
	t.Run("another image's ID", func(t *testing.T) {
		s.editManifest(t, func(m *archive.Manifest) { m.Containers[0].Image.ID = "sha256:" + fmt.Sprintf("%064d", 1) })
		restoreRefused(t, d, s.identity(t), codes.FailedPrecondition, "image")
		harness.Equal(t, "images", imageNames(t, d), before)
	})
}

// CVE-2026-53489: a checkpoint contained the container's log as a symlink, which the restore
// followed to a file of the node.
func TestCVE_2026_53489_LogOfACheckpointIsASymlink(t *testing.T) {
	d := harness.StartDaemon(t, criuOption(t))
	s := foreign(t, d)
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
