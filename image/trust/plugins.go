package trust

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"berth/image/registry"
	"berth/internal/capture"
	"berth/internal/errdefs"
)

// stdinMediaType is the media type of a plugin's standard input.
const stdinMediaType = ocispec.MediaTypeDescriptor

// maxPluginOutput limits the output of a plugin, in bytes.
const maxPluginOutput = 16 << 10

// runPlugins runs the verifier plugins in the order of their names. All must accept the image. The
// protocol is containerd's (docs/image-verification.md). The plugin gets the image's name and
// digest as arguments and its descriptor on standard input. It accepts the image with exit status
// 0, and writes the reason to standard output.
func (c Config) runPlugins(ctx context.Context, ref registry.Reference, top registry.Document) error {
	if c.PluginDir == "" {
		return nil
	}
	entries, err := os.ReadDir(c.PluginDir)
	if errors.Is(err, fs.ErrNotExist) { // no plugins, as in containerd
		return nil
	}
	if err != nil {
		return rejected("read verifier plugins: %w", err)
	}
	var plugins []string
	for _, e := range entries {
		if !e.IsDir() {
			plugins = append(plugins, filepath.Join(c.PluginDir, e.Name()))
		}
	}
	if len(plugins) > c.MaxPlugins {
		return rejected("%s has %d verifier plugins, more than the %d allowed", c.PluginDir, len(plugins), c.MaxPlugins)
	}
	var kind struct {
		MediaType string `json:"mediaType"`
	}
	_ = json.Unmarshal(top.Raw, &kind) // the registry client has parsed it
	descriptor := ocispec.Descriptor{MediaType: kind.MediaType, Digest: top.Digest, Size: int64(len(top.Raw))}
	input, err := json.Marshal(descriptor)
	if err != nil {
		return rejected("encode descriptor: %w", err)
	}
	for _, plugin := range plugins {
		if err := c.runPlugin(ctx, plugin, ref, top, input); err != nil {
			return rejected("verifier plugin %s: %w", filepath.Base(plugin), err)
		}
	}
	return nil
}

func (c Config) runPlugin(
	ctx context.Context, plugin string, ref registry.Reference, top registry.Document, input []byte,
) error {
	ctx, cancel := context.WithTimeout(ctx, c.PluginTimeout)
	defer cancel()
	out, err := capture.New(maxPluginOutput)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, plugin, "-name", ref.String(), "-digest", top.Digest.String(),
		"-stdin-media-type", stdinMediaType)
	cmd.Stdin, cmd.Stdout, cmd.WaitDelay = bytes.NewReader(input), out.File(), time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	killGroup := func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) } // with the plugin's children
	cmd.Cancel = killGroup
	if err = cmd.Start(); err == nil {
		err = cmd.Wait()
		_ = killGroup() // usually nothing is left
	}
	if errors.Is(err, exec.ErrWaitDelay) { // a plugin need not read its input
		err = nil
	}
	ended := out.End()
	line, _, _ := bytes.Cut(out.Bytes(), []byte("\n"))
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("no answer within %v", c.PluginTimeout)
	case err != nil:
		return fmt.Errorf("%w: %s", err, errdefs.Clip(string(line)))
	}
	return ended
}
