package taskapi

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"

	task "github.com/containerd/containerd/api/runtime/task/v3"
	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	runtimeoptions "github.com/containerd/containerd/api/types/runtimeoptions/v1"
	taskTypes "github.com/containerd/containerd/api/types/task"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// typedOptions returns the message that a shim gets with start and Create. Each option is
// NAME=VALUE, with the names that containerd's configuration uses, such as BinaryName and
// ConfigPath. runc's shim has a message of its own, whose state is kept in root. All others have
// the general one.
func typedOptions(shim string, options []string, root string, systemdCgroup bool) (*anypb.Any, error) {
	var message proto.Message = &runtimeoptions.Options{}
	isRunc := strings.HasPrefix(filepath.Base(shim), "containerd-shim-runc-")
	if isRunc {
		message = &runcoptions.Options{}
	}
	if err := parseOptions(options, message); err != nil {
		return nil, err
	}
	if runc, ok := message.(*runcoptions.Options); ok {
		runc.SystemdCgroup = systemdCgroup
		if runc.Root == "" && root != "" {
			runc.Root = filepath.Join(root, "runc")
		}
	} else if len(options) == 0 {
		return nil, nil
	}
	value, err := proto.Marshal(message)
	if err != nil {
		return nil, err
	}
	return &anypb.Any{TypeUrl: string(message.ProtoReflect().Descriptor().FullName()), Value: value}, nil
}

// optionsFor returns the options for one container. runc's shim makes pipes of its own, which the
// container's root must be able to open.
func optionsFor(options *anypb.Any, spec *specs.Spec) (*anypb.Any, error) {
	runc := &runcoptions.Options{}
	if options.GetTypeUrl() != string(runc.ProtoReflect().Descriptor().FullName()) {
		return options, nil
	}
	if err := proto.Unmarshal(options.Value, runc); err != nil {
		return nil, err
	}
	runc.IoUid, runc.IoGid = hostID(spec.Linux.UIDMappings), hostID(spec.Linux.GIDMappings)
	value, err := proto.Marshal(runc)
	return &anypb.Any{TypeUrl: options.TypeUrl, Value: value}, err
}

// hostID returns the ID on the host of the container's root.
func hostID(mappings []specs.LinuxIDMapping) uint32 {
	for _, m := range mappings {
		if m.ContainerID == 0 {
			return m.HostID
		}
	}
	return 0
}

func parseOptions(options []string, message proto.Message) error {
	fields := map[string]any{}
	for _, option := range options {
		name, text, ok := strings.Cut(option, "=")
		if !ok || name == "" {
			return fmt.Errorf("option %q of the shim is not NAME=VALUE", option)
		}
		var value any = text
		switch {
		case name == "ConfigBody": // bytes in the message
			value = base64.StdEncoding.EncodeToString([]byte(text))
		case text == "true" || text == "false":
			value = text == "true"
		}
		fields[strings.ToLower(name[:1])+name[1:]] = value // as in JSON
	}
	data, err := json.Marshal(fields)
	if err != nil {
		return err
	}
	if err := protojson.Unmarshal(data, message); err != nil {
		return fmt.Errorf("options of the shim: %w", err)
	}
	return nil
}

// statusName returns the status of a task in the words of the runtime-spec.
func statusName(state *task.StateResponse) string {
	switch state.Status {
	case taskTypes.Status_CREATED:
		return "created"
	case taskTypes.Status_STOPPED:
		return "stopped"
	}
	return "running"
}
