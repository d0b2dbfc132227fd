package client

import (
	"context"
	"encoding/json"
	"time"

	"github.com/distribution/reference"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Layer is how far one layer of a pull is.
type Layer struct {
	Digest string `json:"digest"`
	State  string `json:"state"` // the runtime's word for what happens to it
	Done   int64  `json:"done"`  // bytes
	Total  int64  `json:"total"` // bytes, 0 while unknown
}

// Pull is one pull that is under way in the runtime, as berth tells it in the
// verbose Status under the key "pulls".
type Pull struct {
	Ref     string    `json:"ref"`
	Started time.Time `json:"started"`
	Layers  []Layer   `json:"layers"`
}

// progressInterval is how often a pull's progress is asked for: often enough for
// a bar to look alive.
const progressInterval = 100 * time.Millisecond

// PullWithProgress pulls an image and returns its ID. While the pull runs, each
// is called with what Status tells about this reference; it is not called
// by a runtime that tells nothing. auth may be nil.
func (c *Client) PullWithProgress(ctx context.Context, ref string, auth *runtimeapi.AuthConfig, each func([]Layer)) (string, error) {
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
	reply, err := c.PullImage(ctx, &runtimeapi.PullImageRequest{
		Image: &runtimeapi.ImageSpec{Image: ref, UserSpecifiedImage: ref},
		Auth:  auth,
	})
	if err != nil {
		return "", Explain("pull "+ref, err)
	}
	return reply.GetImageRef(), nil
}

// progress asks how far the pull of ref is. It tells no error: the pull itself
// reports what is wrong.
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

// sameRef compares references as people write them: "busybox" is
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
