package operator

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
	"berth/internal/errdefs"
)

func inspectCommand(o *Connection) *cobra.Command {
	var kind, format string
	cmd := &cobra.Command{
		Use:   "inspect NAME…",
		Short: "Show all details of containers, pods and images",
		Long: `Show the complete status of containers, pods and images as JSON, in the layout of
"crictl inspect": the fields of CRI under "status", and the runtime's own details,
such as the process ID and the OCI specification, under "info". Several names give an
array. A name is looked up as a container, then as a pod, then as an image.`,
		Example: "  berth inspect web/app\n" +
			"  berth inspect -f '{{.status.state}} {{.info.pid}}' web/app\n" +
			"  berth inspect --type image -f '{{.status.size}}' busybox",
		Args: cli.Args(1, 0, "name a container, pod or image"),
	}
	out := addOutputFlag(cmd, outputJSON, outputYAML, outputTemplate)
	cmd.Flags().StringVarP(&format, "format", "f", "", "template for each object, as -o go-template=…")
	cmd.Flags().StringVar(&kind, "type", "", "container, pod or image; default: the first that has the name")
	complete(cmd, "type", "container", "pod", "image")
	cmd.ValidArgsFunction = o.completeNames(containerNames, podNames, imageNames)
	cmd.RunE = o.connected(func(cmd *cobra.Command, args []string, c *client.Client) error {
		switch {
		case format == outputJSON || format == outputYAML:
			out.format = format
		case format != "":
			if err := out.setTemplate(format); err != nil {
				return fmt.Errorf("--format: %w", err)
			}
		}
		var found []inspected
		var errs []error
		for _, ref := range args {
			object, err := inspect(cmd.Context(), c, kind, ref)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			found = append(found, *object)
		}
		var err error
		switch {
		case len(args) == 1 && len(found) == 1:
			err = printValue(cmd.OutOrStdout(), out, found[0])
		case len(found) > 0:
			err = printValues(cmd.OutOrStdout(), out, found)
		}
		return errors.Join(append(errs, err)...)
	})
	return cmd
}

// inspected is the JSON form of an object, in the layout of crictl.
type inspected struct {
	Status json.RawMessage            `json:"status"`
	Info   map[string]json.RawMessage `json:"info,omitempty"`
}

// inspect finds an object. An empty kind means a container, else a pod, else an image.
func inspect(ctx context.Context, c *client.Client, kind, ref string) (*inspected, error) {
	switch kind {
	case "":
		container, pod, err := c.Find(ctx, ref)
		switch {
		case errdefs.IsNotFound(err):
			if image, err := inspectImage(ctx, c, ref); !errdefs.IsNotFound(err) {
				return image, err
			}
			return nil, errdefs.NotFound("no container, pod or image %q", ref)
		case err != nil:
			return nil, err
		case pod != nil:
			return inspectPod(ctx, c, pod.GetId())
		}
		return inspectContainer(ctx, c, container.GetId())
	case "container":
		container, err := c.FindContainer(ctx, ref)
		if err != nil {
			return nil, err
		}
		return inspectContainer(ctx, c, container.GetId())
	case "pod":
		pod, err := c.FindPod(ctx, ref)
		if err != nil {
			return nil, err
		}
		return inspectPod(ctx, c, pod.GetId())
	case "image":
		return inspectImage(ctx, c, ref)
	}
	return nil, fmt.Errorf("--type %q: want container, pod or image", kind)
}

func inspectContainer(ctx context.Context, c *client.Client, id string) (*inspected, error) {
	reply, err := c.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: id, Verbose: true})
	if err != nil {
		return nil, fmt.Errorf("inspect container %s: %w", client.ShortID(id), err)
	}
	return newInspected(reply.GetStatus(), reply.GetInfo())
}

func inspectPod(ctx context.Context, c *client.Client, id string) (*inspected, error) {
	reply, err := c.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true})
	if err != nil {
		return nil, fmt.Errorf("inspect pod %s: %w", client.ShortID(id), err)
	}
	return newInspected(reply.GetStatus(), reply.GetInfo())
}

func inspectImage(ctx context.Context, c *client.Client, ref string) (*inspected, error) {
	reply, err := c.ImageStatus(ctx, &runtimeapi.ImageStatusRequest{
		Image: &runtimeapi.ImageSpec{Image: ref}, Verbose: true})
	if err != nil {
		return nil, fmt.Errorf("inspect image %s: %w", ref, err)
	}
	if reply.GetImage() == nil { // CRI's answer for a missing image
		return nil, errdefs.NotFound("no image %q", ref)
	}
	return newInspected(reply.GetImage(), reply.GetInfo())
}

// newInspected converts a status and the info of a verbose answer. Runtimes put JSON objects into
// the values of info. The object named "info" is the info itself, as in crictl's output.
func newInspected(status proto.Message, info map[string]string) (*inspected, error) {
	text, err := protojson.MarshalOptions{EmitUnpopulated: true}.Marshal(status)
	if err != nil {
		return nil, err
	}
	if text, err = readableTimes(text); err != nil {
		return nil, err
	}
	out := &inspected{Status: text, Info: map[string]json.RawMessage{}}
	for key, value := range info {
		raw := json.RawMessage(value)
		if !json.Valid(raw) {
			if raw, err = json.Marshal(value); err != nil {
				return nil, err
			}
		}
		out.Info[key] = raw
	}
	if only, ok := out.Info["info"]; ok {
		var fields map[string]json.RawMessage
		if json.Unmarshal(only, &fields) == nil {
			delete(out.Info, "info")
			for key, value := range fields {
				out.Info[key] = value
			}
		}
	}
	return out, nil
}

// timeFields are fields of a status with nanoseconds since 1970, or 0.
var timeFields = []string{"createdAt", "startedAt", "finishedAt"}

// readableTimes replaces the times of a status by RFC 3339 times, as crictl does. It keeps the
// order of the fields.
func readableTimes(status []byte) ([]byte, error) {
	dec := json.NewDecoder(bytes.NewReader(status))
	var out bytes.Buffer
	if _, err := dec.Token(); err != nil { // {
		return nil, err
	}
	separator := byte('{')
	for dec.More() {
		name, err := dec.Token()
		var value json.RawMessage
		if err == nil {
			err = dec.Decode(&value)
		}
		if err != nil {
			return nil, err
		}
		if field, _ := name.(string); slices.Contains(timeFields, field) {
			value = readableTime(value)
		}
		_, _ = fmt.Fprintf(&out, "%c%q:%s", separator, name, value) // a buffer takes everything
		separator = ','
	}
	if separator == '{' {
		return status, nil
	}
	out.WriteByte('}')
	return out.Bytes(), nil
}

// readableTime converts nanoseconds in a JSON string.
func readableTime(value json.RawMessage) json.RawMessage {
	ns, err := strconv.ParseInt(strings.Trim(string(value), `"`), 10, 64)
	if err != nil {
		return value
	}
	at := time.Time{}
	if ns != 0 {
		at = time.Unix(0, ns).UTC()
	}
	return json.RawMessage(strconv.Quote(at.Format(time.RFC3339Nano)))
}
