package operator

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
	"berth/cmd/berth/terminal"
)

func eventsCommand(o *Connection) *cobra.Command {
	var asJSON bool
	var given []string
	cmd := &cobra.Command{
		Use:   "events",
		Short: "Print containers' and pods' events as they happen",
		Long: `Print the events of containers and pods until Ctrl-C: created, started, stopped and
deleted. CRI has no past events.`,
		Example: "  berth events --filter namespace=default\n  berth events --json | jq .type",
		Args:    cli.NoArgs,
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print each event as a JSON object on one line")
	cmd.Flags().StringArrayVar(&given, "filter", nil, "KEY=VALUE; events must match all filters; keys: "+eventFilters.keys())
	cmd.RunE = o.connected(func(cmd *cobra.Command, _ []string, c *client.Client) error {
		if _, err := eventFilters.apply([]event{{}}, given); err != nil {
			return err
		}
		ctx, stop := cli.Interruptible(cmd.Context())
		defer stop()
		stream, err := c.GetContainerEvents(ctx, &runtimeapi.GetEventsRequest{})
		if err != nil {
			return cli.Silent(cli.InterruptStatus(ctx, err))
		}
		seen, err := knownObjects(ctx, c)
		for err == nil {
			var next *runtimeapi.ContainerEventResponse
			if next, err = stream.Recv(); err != nil {
				break
			}
			var wanted []event
			wanted, err = eventFilters.apply([]event{seen.complete(newEvent(next), next)}, given)
			if err == nil && len(wanted) > 0 {
				err = wanted[0].print(cmd.OutOrStdout(), asJSON)
			}
		}
		if errors.Is(err, io.EOF) {
			return errors.New("the runtime has ended the stream of events")
		}
		return cli.Silent(cli.InterruptStatus(ctx, err))
	})
	return cmd
}

var eventFilters = filters[event]{
	"type":      byWord(func(e event) string { return e.Type }),
	"id":        byPrefix(func(e event) string { return e.ID }),
	"pod":       byPattern(func(e event) string { return e.Pod }),
	"namespace": byPattern(func(e event) string { return e.Namespace }),
	"container": byPattern(func(e event) string { return e.Container }),
}

// event is the JSON form of an event.
type event struct {
	Time      time.Time `json:"time"`
	Type      string    `json:"type"` // created, started, stopped or deleted
	ID        string    `json:"id"`   // of the container, or of the pod
	Namespace string    `json:"namespace,omitempty"`
	Pod       string    `json:"pod,omitempty"`
	Container string    `json:"container,omitempty"` // empty: an event of the pod
	ExitCode  *int32    `json:"exitCode,omitempty"`
	Reason    string    `json:"reason,omitempty"`
}

func newEvent(r *runtimeapi.ContainerEventResponse) event {
	meta := r.GetPodSandboxStatus().GetMetadata()
	kind := strings.TrimSuffix(r.GetContainerEventType().String(), "_EVENT")
	e := event{Time: time.Unix(0, r.GetCreatedAt()).UTC(), Type: stateWord(kind, "CONTAINER_"), ID: r.GetContainerId(),
		Namespace: meta.GetNamespace(), Pod: meta.GetName()}
	for _, status := range r.GetContainersStatuses() {
		if status.GetId() != e.ID {
			continue
		}
		e.Container = status.GetMetadata().GetName()
		if status.GetState() == runtimeapi.ContainerState_CONTAINER_EXITED {
			code := status.GetExitCode()
			e.ExitCode, e.Reason = &code, status.GetReason()
		}
	}
	return e
}

// objects are the names of containers and pods by their IDs. Events of deleted objects have no
// names.
type objects map[string]event

// knownObjects returns the names of present containers.
func knownObjects(ctx context.Context, c *client.Client) (objects, error) {
	containers, err := c.Containers(ctx)
	known := objects{}
	for _, container := range containers {
		known[container.GetId()] = event{Namespace: client.PodNamespace(container), Pod: client.PodName(container),
			Container: container.GetMetadata().GetName()}
	}
	return known, err
}

// complete adds the names that earlier events had. It forgets a deleted object.
func (o objects) complete(e event, r *runtimeapi.ContainerEventResponse) event {
	for _, status := range r.GetContainersStatuses() {
		o[status.GetId()] = event{Namespace: e.Namespace, Pod: e.Pod, Container: status.GetMetadata().GetName()}
	}
	if names, ok := o[e.ID]; ok {
		e.Container = cmp.Or(e.Container, names.Container)
		e.Pod, e.Namespace = cmp.Or(e.Pod, names.Pod), cmp.Or(e.Namespace, names.Namespace)
	}
	if e.Type == "deleted" {
		delete(o, e.ID)
	}
	return e
}

func (e event) print(w io.Writer, asJSON bool) error {
	if asJSON {
		line, err := json.Marshal(e)
		if err == nil {
			_, err = fmt.Fprintf(w, "%s\n", line)
		}
		return err
	}
	object := e.Namespace + "/" + e.Pod
	if e.Container != "" {
		object += "/" + e.Container
	}
	exit := ""
	if e.ExitCode != nil && e.Type == "stopped" {
		exit = fmt.Sprintf(" (exit code %d, %s)", *e.ExitCode, e.Reason)
	}
	_, err := fmt.Fprintf(w, "%s  %-7s  %s  %s%s\n", e.Time.Local().Format("2006-01-02T15:04:05.000Z07:00"), e.Type,
		client.ShortID(e.ID), terminal.Printable(object), terminal.Printable(exit))
	return err
}
