package client

import (
	"context"

	"berth/internal/errdefs"
	"berth/sandbox/history"
	"berth/server/admin"
)

// Starts returns the last pod starts that berth keeps, newest first.
func (c *Client) Starts(ctx context.Context) (all []history.Summary, err error) {
	return all, c.admin(ctx, admin.StartsMethod, struct{}{}, &all)
}

// FindStart returns the start of the pod that ref identifies, in the forms of FindPod. If no
// present pod matches, it looks for removed pods. If several removed pods have the same name, the
// newest counts.
func (c *Client) FindStart(ctx context.Context, ref string) (start history.Start, err error) {
	id, err := c.podOfStart(ctx, ref)
	if err != nil {
		return start, err
	}
	return start, c.admin(ctx, admin.StartMethod, admin.StartRequest{PodID: id}, &start)
}

// podOfStart returns the ID of a present or removed pod.
func (c *Client) podOfStart(ctx context.Context, ref string) (id string, err error) {
	pod, err := c.FindPod(ctx, ref)
	if err == nil {
		return pod.GetId(), nil
	}
	if !errdefs.IsNotFound(err) {
		return "", err
	}
	starts, err := c.Starts(ctx)
	if err != nil {
		return "", err
	}
	start, err := only("pod", ref, match(ref, starts, startNames))
	return start.ID, err
}

func startNames(s history.Summary) identity {
	full := s.Namespace + "/" + s.Name
	return identity{s.ID, []string{s.Name, full}, full}
}
