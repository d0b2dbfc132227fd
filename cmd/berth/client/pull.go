package client

import (
	"context"
	"encoding/json"
	"time"

	"github.com/distribution/reference"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Layer is the progress of one layer of a pull.
type Layer struct {
	Digest string `json:"digest"`
	State  string `json:"state"` // the runtime's name of the current step
	Done   int64  `json:"done"`  // bytes
	Kept   int64  `json:"kept"`  // bytes of done that come from an earlier pull that failed
	Total  int64  `json:"total"` // bytes, 0 while unknown
}

// Pull is a pull in progress, as berth reports it under "pulls" in verbose Status.
type Pull struct {
	Ref     string    `json:"ref"`
	Started time.Time `json:"started"`
	Layers  []Layer   `json:"layers"`
}

// progressInterval is the time between two reads of the progress. It is short enough for a smooth
// progress bar.
const progressInterval = 100 * time.Millisecond

// PullWithProgress pulls an image and returns its ID. During the pull it calls each with the
// progress that Status reports for ref. A runtime may report none. auth may be nil.
func (c *Client) PullWithProgress(ctx context.Context, ref string, auth *runtimeapi.AuthConfig,
	each func([]Layer)) (string, error) {
	type result struct {
		id  string
		err error
	}
	done := make(chan result, 1)
	go func() {
		id, err := c.Pull(ctx, ref, auth)
		done <- result{id, err}
	}()
	tick := time.NewTicker(progressInterval)
	defer tick.Stop()
	for {
		select {
		case r := <-done:
			return r.id, r.err
		case <-tick.C:
			if layers, ok := c.progress(ctx, ref); ok {
				each(layers)
			}
		}
	}
}

// Pull pulls an image and returns its ID. auth may be nil.
func (c *Client) Pull(ctx context.Context, ref string, auth *runtimeapi.AuthConfig) (string, error) {
	return c.PullFor(ctx, nil, ref, auth)
}

// PullFor is Pull for a pod, which may not exist yet. The signature policy of its namespace
// decides, and berth trace shows the pull. pod may be nil.
func (c *Client) PullFor(ctx context.Context, pod *runtimeapi.PodSandboxMetadata, ref string,
	auth *runtimeapi.AuthConfig) (string, error) {
	req := &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: ref, UserSpecifiedImage: ref}, Auth: auth}
	if pod != nil {
		req.SandboxConfig = &runtimeapi.PodSandboxConfig{Metadata: pod}
	}
	reply, err := c.PullImage(ctx, req)
	if err != nil {
		return "", Explain("pull "+ref, err)
	}
	return reply.GetImageRef(), nil
}

// progress returns the progress of ref's pull. It drops errors, because the pull itself reports
// them.
func (c *Client) progress(ctx context.Context, ref string) ([]Layer, bool) {
	reply, err := c.Status(ctx, &runtimeapi.StatusRequest{Verbose: true})
	if err != nil {
		return nil, false
	}
	var pulls []Pull
	if json.Unmarshal([]byte(reply.GetInfo()["pulls"]), &pulls) != nil {
		return nil, false
	}
	for _, p := range pulls {
		if sameRef(p.Ref, ref) && len(p.Layers) > 0 {
			return p.Layers, true
		}
	}
	return nil, false
}

// sameRef compares references in their short forms: "busybox" is
// "docker.io/library/busybox:latest".
func sameRef(a, b string) bool {
	if a == b {
		return true
	}
	left, err := reference.ParseDockerRef(a)
	if err != nil {
		return false
	}
	right, err := reference.ParseDockerRef(b)
	return err == nil && left.String() == right.String()
}
