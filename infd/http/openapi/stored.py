"""The operations of the Responses API, and of its conversations."""

from __future__ import annotations

from typing import Final, Literal

from infd.errors import ItemNotFound, NotStored, ToolServerFailed
from infd.http.openapi.operation import BODY, CONVERSATION, GENERATED, PROMPT, RESPONSE, Link, Operation, Parameter
from infd.http.schema import responses
from infd.http.store.items import ItemList

PAGE: Final = (
    Parameter(name="limit", type=int, text="Most items of the page, from 1 to 100; 20 by default."),
    Parameter(name="order", type=Literal["asc", "desc"], text="desc, the default: the last item first."),
    Parameter(name="after", type=str, text="Id of the item before the page's first."),
)
RESPONSE_ID: Final = Parameter(name="id", type=str, text="Id of a response.")
CONVERSATION_ID: Final = Parameter(name="id", type=str, text="Id of a conversation.")
ITEM_ID: Final = Parameter(name="item", type=str, text="Id of an item.")
ID: Final = {"id": "$response.body#/id"}
SAME: Final = {"id": "$request.path.id"}

STORED: Final[tuple[Operation, ...]] = (
    Operation(
        method="post",
        path="/v1/responses",
        name="createResponse",
        text="Generate a response; with `background` return at once, before it is generated.",
        tag="Responses",
        request=responses.ResponsesRequest,
        answers=(responses.ResponseObject,),
        streams=True,
        errors=(*GENERATED, *RESPONSE, *CONVERSATION, ToolServerFailed),
        links=(
            Link(operation="getResponse", parameters=ID),
            Link(operation="listInputItems", parameters=ID),
            Link(operation="cancelResponse", parameters=ID),
            Link(operation="deleteResponse", parameters=ID),
        ),
    ),
    Operation(
        method="post",
        path="/v1/responses/input_tokens",
        name="countInputTokens",
        text="Count the tokens of a conversation's prompt.",
        tag="Responses",
        request=responses.InputTokensRequest,
        answers=(responses.InputTokens,),
        errors=(*PROMPT, *RESPONSE, *CONVERSATION, ToolServerFailed),
    ),
    Operation(
        method="get",
        path="/v1/responses/{id}",
        name="getResponse",
        text="Return a stored response; with `stream` the events of a response in the background.",
        tag="Responses",
        answers=(responses.ResponseObject,),
        streams=True,
        errors=RESPONSE,
        parameters=(
            RESPONSE_ID,
            Parameter(name="stream", type=bool, text="Send events; only for a response in the background."),
            Parameter(name="starting_after", type=int, text="Number of the event before the first event sent."),
        ),
    ),
    Operation(
        method="delete",
        path="/v1/responses/{id}",
        name="deleteResponse",
        text="Delete a stored response, and end its generation.",
        tag="Responses",
        answers=(responses.Deleted,),
        errors=RESPONSE,
        parameters=(RESPONSE_ID,),
        links=(Link(operation="getResponse", parameters=SAME),),
    ),
    Operation(
        method="post",
        path="/v1/responses/{id}/cancel",
        name="cancelResponse",
        text="Cancel a response in the background.",
        tag="Responses",
        answers=(responses.ResponseObject,),
        errors=RESPONSE,
        parameters=(RESPONSE_ID,),
    ),
    Operation(
        method="get",
        path="/v1/responses/{id}/input_items",
        name="listInputItems",
        text="Return a page of the items before a response's output.",
        tag="Responses",
        answers=(ItemList,),
        errors=RESPONSE,
        parameters=(RESPONSE_ID, *PAGE),
    ),
    Operation(
        method="post",
        path="/v1/conversations",
        name="createConversation",
        text="Create a conversation.",
        tag="Responses",
        request=responses.ConversationRequest,
        answers=(responses.ConversationObject,),
        errors=(*BODY, NotStored),
        links=(
            Link(operation="getConversation", parameters=ID),
            Link(operation="updateConversation", parameters=ID),
            Link(operation="addItems", parameters=ID),
            Link(operation="listItems", parameters=ID),
            Link(operation="deleteConversation", parameters=ID),
        ),
    ),
    Operation(
        method="get",
        path="/v1/conversations/{id}",
        name="getConversation",
        text="Return a conversation.",
        tag="Responses",
        answers=(responses.ConversationObject,),
        errors=CONVERSATION,
        parameters=(CONVERSATION_ID,),
    ),
    Operation(
        method="post",
        path="/v1/conversations/{id}",
        name="updateConversation",
        text="Replace a conversation's metadata.",
        tag="Responses",
        request=responses.ConversationUpdate,
        answers=(responses.ConversationObject,),
        errors=(*BODY, *CONVERSATION),
        parameters=(CONVERSATION_ID,),
    ),
    Operation(
        method="delete",
        path="/v1/conversations/{id}",
        name="deleteConversation",
        text="Delete a conversation. Responses that continued it remain.",
        tag="Responses",
        answers=(responses.ConversationDeleted,),
        errors=CONVERSATION,
        parameters=(CONVERSATION_ID,),
        links=(Link(operation="getConversation", parameters=SAME),),
    ),
    Operation(
        method="post",
        path="/v1/conversations/{id}/items",
        name="addItems",
        text="Add items at a conversation's end.",
        tag="Responses",
        request=responses.NewItems,
        answers=(ItemList,),
        errors=(*BODY, *CONVERSATION),
        parameters=(CONVERSATION_ID,),
        links=(
            Link(operation="getItem", parameters={**SAME, "item": "$response.body#/first_id"}),
            Link(operation="deleteItem", parameters={**SAME, "item": "$response.body#/last_id"}),
        ),
    ),
    Operation(
        method="get",
        path="/v1/conversations/{id}/items",
        name="listItems",
        text="Return a page of a conversation's items.",
        tag="Responses",
        answers=(ItemList,),
        errors=CONVERSATION,
        parameters=(CONVERSATION_ID, *PAGE),
    ),
    Operation(
        method="get",
        path="/v1/conversations/{id}/items/{item}",
        name="getItem",
        text="Return an item of a conversation.",
        tag="Responses",
        errors=(*CONVERSATION, ItemNotFound),
        parameters=(CONVERSATION_ID, ITEM_ID),
    ),
    Operation(
        method="delete",
        path="/v1/conversations/{id}/items/{item}",
        name="deleteItem",
        text="Delete an item; return its conversation.",
        tag="Responses",
        answers=(responses.ConversationObject,),
        errors=(*CONVERSATION, ItemNotFound),
        parameters=(CONVERSATION_ID, ITEM_ID),
    ),
)
