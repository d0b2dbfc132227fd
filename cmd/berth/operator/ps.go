package operator

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
	"berth/internal/errdefs"
)

func psCommand(o *Connection) *cobra.Command {
	var all, pods bool
	cmd := &cobra.Command{
		Use:   "ps",
		Short: "List containers, or pods",
		Long:  `List running containers, or all with -a; with --pods, ready pods or all. crictl has filters and more columns.`,
		Args:  cli.NoArgs,
	}
	l := addListFlags(cmd)
	cmd.Flags().BoolVarP(&all, "all", "a", false, "also list containers that do not run, and pods that are not ready")
	cmd.Flags().BoolVar(&pods, "pods", false, "list pods instead of containers")
	cmd.RunE = o.Connected(func(cmd *cobra.Command, _ []string, c *client.Client) error {
		if pods {
			rows, err := podRows(cmd.Context(), c, all)
			if err != nil {
				return err
			}
			return printList(cmd.OutOrStdout(), l, rows, "POD", "NAME", "NAMESPACE", "STATE", "IP", "AGE")
		}
		rows, err := containerRows(cmd.Context(), c, all)
		if err != nil {
			return err
		}
		return printList(cmd.OutOrStdout(), l, rows, "CONTAINER", "NAME", "POD", "IMAGE", "STATE", "AGE")
	})
	return cmd
}

// containerRow is the JSON form of a container, and a row of ps.
type containerRow struct {
	ID        string            `json:"id"`
	Name      string            `json:"name"`
	Attempt   uint32            `json:"attempt"`
	Pod       string            `json:"pod"`
	Namespace string            `json:"namespace"`
	PodID     string            `json:"podId"`
	Image     string            `json:"image"`
	ImageID   string            `json:"imageId"`
	State     string            `json:"state"` // created, running, exited or unknown
	ExitCode  *int32            `json:"exitCode,omitempty"`
	Reason    string            `json:"reason,omitempty"`
	Created   time.Time         `json:"created"`
	Labels    map[string]string `json:"labels,omitempty"`
}

func (r containerRow) fullID() string { return r.ID }

func (r containerRow) cells(l *listFlags) []cli.Cell {
	row := cli.Cells(l.id(r.ID), r.Name, r.Pod, r.Image, r.State, cli.Age(time.Now(), r.Created))
	state := &row[4]
	switch {
	case r.ExitCode != nil:
		state.Text = fmt.Sprintf("%s (%d)", r.State, *r.ExitCode)
		if *r.ExitCode != 0 {
			state.Color = cli.Red
		}
	case r.State == "running":
		state.Color = cli.Green
	}
	return row
}

func containerRows(ctx context.Context, c *client.Client, all bool) ([]containerRow, error) {
	list, err := c.Containers(ctx)
	if err != nil {
		return nil, err
	}
	var rows []containerRow
	for _, item := range list {
		running := item.GetState() == runtimeapi.ContainerState_CONTAINER_RUNNING
		if !all && !running {
			continue
		}
		row := newContainerRow(item)
		if item.GetState() == runtimeapi.ContainerState_CONTAINER_EXITED {
			if err := row.addExit(ctx, c); err != nil {
				return nil, err
			}
		}
		rows = append(rows, row)
	}
	return rows, nil
}

func newContainerRow(c *runtimeapi.Container) containerRow {
	image := c.GetImage().GetUserSpecifiedImage()
	if image == "" {
		image = c.GetImage().GetImage()
	}
	imageID := c.GetImageId()
	if imageID == "" {
		imageID = c.GetImageRef()
	}
	return containerRow{
		ID: c.GetId(), Name: c.GetMetadata().GetName(), Attempt: c.GetMetadata().GetAttempt(),
		Pod: client.PodName(c), Namespace: client.PodNamespace(c), PodID: c.GetPodSandboxId(),
		Image: image, ImageID: imageID, Labels: c.GetLabels(),
		State:   stateWord(c.GetState().String(), "CONTAINER_"),
		Created: time.Unix(0, c.GetCreatedAt()),
	}
}

// addExit adds details that a list lacks. It does not change a container that was removed
// meanwhile.
func (r *containerRow) addExit(ctx context.Context, c *client.Client) error {
	status, err := c.ContainerState(ctx, r.ID)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	code := status.GetExitCode()
	r.ExitCode, r.Reason = &code, status.GetReason()
	return nil
}

// stateWord converts the name of a protobuf enum to a word.
func stateWord(name, prefix string) string { return strings.ToLower(strings.TrimPrefix(name, prefix)) }

// podRow is the JSON form of a pod, and a row of ps --pods.
type podRow struct {
	ID        string            `json:"id"`
	Name      string            `json:"name"`
	Namespace string            `json:"namespace"`
	UID       string            `json:"uid"`
	Attempt   uint32            `json:"attempt"`
	State     string            `json:"state"` // ready or notready
	IPs       []string          `json:"ips"`
	Handler   string            `json:"runtimeHandler"` // empty: the default
	Created   time.Time         `json:"created"`
	Labels    map[string]string `json:"labels,omitempty"`
}

func (r podRow) fullID() string { return r.ID }

func (r podRow) cells(l *listFlags) []cli.Cell {
	row := cli.Cells(l.id(r.ID), r.Name, r.Namespace, r.State, strings.Join(r.IPs, ","), cli.Age(time.Now(), r.Created))
	if r.State == "ready" {
		row[3].Color = cli.Green
	}
	return row
}

func podRows(ctx context.Context, c *client.Client, all bool) ([]podRow, error) {
	list, err := c.Pods(ctx)
	if err != nil {
		return nil, err
	}
	var rows []podRow
	for _, item := range list {
		ready := item.GetState() == runtimeapi.PodSandboxState_SANDBOX_READY
		if !all && !ready {
			continue
		}
		status, err := c.PodState(ctx, item.GetId())
		if err != nil && !errdefs.IsNotFound(err) {
			return nil, err
		}
		meta := item.GetMetadata()
		rows = append(rows, podRow{
			ID: item.GetId(), Name: meta.GetName(), Namespace: meta.GetNamespace(), UID: meta.GetUid(),
			Attempt: meta.GetAttempt(), Handler: item.GetRuntimeHandler(), Labels: item.GetLabels(),
			State: stateWord(item.GetState().String(), "SANDBOX_"), IPs: append([]string{}, client.PodIPs(status)...),
			Created: time.Unix(0, item.GetCreatedAt()),
		})
	}
	return rows, nil
}
