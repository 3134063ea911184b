from swarmnet.wire.pb import calls_pb2 as _calls_pb2
from swarmnet.wire.pb import control_pb2 as _control_pb2
from swarmnet.wire.pb import punch_pb2 as _punch_pb2
from swarmnet.wire.pb import relay_pb2 as _relay_pb2
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor
